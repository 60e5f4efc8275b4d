"""Two arms' engines differ in their speculation and in nothing else, and share what there is."""

from pathlib import Path
from typing import Any

import pytest

from specbench import vllm_names
from specbench.config import Config
from specbench.engines.installation import Installation
from specbench.engines.launch import Launch, plan_launch
from specbench.errors import UserError

EAGLE = {"method": "eagle", "model": "head", "num_speculative_tokens": 3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
ONLY_SPECULATIVE = ("--speculative-config", "--per-request-spec-decode-metrics")


def config(**engine: Any) -> Config:  # noqa: ANN401
    return Config.model_validate({"model": "m", "prompts": "p", "engine": engine})


def installation(*, cpu: bool, python: Path = Path("/opt/vllm/bin/python")) -> Installation:
    return Installation(python, Path(), vllm_names.recorded(), is_cpu=cpu, lacks_metadata=cpu)


def launch(
    made: Config,
    speculative: dict[str, Any] | None = None,
    *,
    cpu: bool = False,
    together: int = 1,
) -> Launch:
    return plan_launch(
        made,
        installation(cpu=cpu),
        model="m",
        speculative_config=speculative,
        engines_together=together,
    )


def flags(made: Launch) -> dict[str, str]:
    """Each flag with what follows it, as text."""
    words = made.argv[made.argv.index("serve") + 2 :]
    starts = [i for i, word in enumerate(words) if word.startswith("--")]
    ends = [*starts[1:], len(words)]
    pairs = {words[a]: " ".join(words[a + 1 : b]) for a, b in zip(starts, ends, strict=True)}
    assert len(pairs) == len(starts)  # no flag stands twice
    return pairs


@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("speculative", [EAGLE, NGRAM])
def test_arms_differ_in_their_speculation_only(
    cpu: bool, together: int, speculative: dict[str, Any]
) -> None:
    made = config(args={"gpu_memory_utilization": 0.8, "max_model_len": 2048}, env={"A": "b"})
    baseline = launch(made, cpu=cpu, together=together)
    arm = launch(made, speculative, cpu=cpu, together=together)
    rest = {k: v for k, v in flags(arm).items() if k not in ONLY_SPECULATIVE}
    assert rest == flags(baseline)
    assert len(flags(arm)) == len(rest) + len(ONLY_SPECULATIVE)
    assert dict(arm.env) == dict(baseline.env)
    assert arm.notes == baseline.notes


@pytest.mark.parametrize(
    ("own", "together", "share"), [(None, 2, "0.45"), (0.8, 2, "0.4"), (0.9, 8, "0.1125")]
)
def test_engines_that_are_up_together_share_the_gpu_evenly(
    own: float | None, together: int, share: str
) -> None:
    args = {} if own is None else {"gpu_memory_utilization": own}
    made = launch(config(args=args), together=together)
    assert flags(made)["--gpu-memory-utilization"] == share
    assert any(f"{together} engines share" in note for note in made.notes)


@pytest.mark.parametrize("together", range(2, 17))
def test_the_shares_of_a_gpu_never_add_up_to_more_than_it_has(together: int) -> None:
    for total in (0.9, 0.95, 1.0, 0.3):
        made = launch(config(args={"gpu_memory_utilization": total}), together=together)
        share = float(flags(made)["--gpu-memory-utilization"])
        assert total - 0.0002 * together < share * together <= total + 1e-9


def test_an_engine_alone_on_a_gpu_has_what_the_config_says() -> None:
    assert "--gpu-memory-utilization" not in flags(launch(config()))
    made = launch(config(args={"gpu_memory_utilization": 0.7}))
    assert flags(made)["--gpu-memory-utilization"] == "0.7"


@pytest.mark.parametrize("value", ["most of it", True, 0, 1.5, [0.9]])
def test_a_share_of_a_gpu_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(UserError, match="gpu_memory_utilization"):
        launch(config(args={"gpu_memory_utilization": value}), together=2)


def test_the_memory_of_a_cpu_engine_is_the_same_however_many_are_up() -> None:
    alone, shared = launch(config(), cpu=True), launch(config(), cpu=True, together=4)
    assert alone == shared
    assert flags(shared)["--kv-cache-memory-bytes"] == str(1 << 30)


def test_an_idle_engine_leaves_the_cores_alone_and_none_is_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without these, Intel's OpenMP pins a fork to core 0 and spins for 200 ms after each answer."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    made = launch(config(), cpu=True, together=2)
    assert made.env["KMP_AFFINITY"] == "none"
    assert made.env["KMP_BLOCKTIME"] == "1"
    assert made.env["OMP_NUM_THREADS"] == made.env["NUMBA_NUM_THREADS"] == "4"
    assert "4 thread(s) on any of 8 cores" in made.notes[0]


def test_the_configs_own_environment_goes_over_ours() -> None:
    assert launch(config(env={"KMP_BLOCKTIME": "5"}), cpu=True).env["KMP_BLOCKTIME"] == "5"
