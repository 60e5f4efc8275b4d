"""Two arms' engines differ in their speculation and in nothing else, and share what there is."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from specbench import vllm_names
from specbench.config import Config
from specbench.engines.installation import Installation, lacks, missing_libraries
from specbench.engines.launch import Launch, bind, engine_cores, plan_launch
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


@pytest.mark.parametrize(("own", "has"), [({}, 5 << 30), ({"kv_cache_memory_bytes": "2G"}, "2G")])
def test_a_cpu_engine_has_the_kv_cache_that_was_worked_out_unless_the_config_says(
    own: dict[str, Any], has: object
) -> None:
    made = plan_launch(
        config(args=own),
        installation(cpu=True),
        model="m",
        speculative_config=None,
        engines_together=1,
        cpu_kv_cache_bytes=5 << 30,
    )
    assert flags(made)["--kv-cache-memory-bytes"] == str(has)
    assert made.model_json["kv_cache_memory_bytes"] == has


def test_an_idle_engine_leaves_the_cores_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without these, Intel's OpenMP pins a fork to core 0 and spins for 200 ms after each answer."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    made = launch(config(), cpu=True, together=2)
    assert made.env["KMP_AFFINITY"] == "none"
    assert made.env["KMP_BLOCKTIME"] == "1"
    assert made.env["OMP_NUM_THREADS"] == made.env["NUMBA_NUM_THREADS"] == "4"
    assert "4 thread(s)" in made.notes[0]


def test_the_configs_own_environment_goes_over_ours() -> None:
    assert launch(config(env={"KMP_BLOCKTIME": "5"}), cpu=True).env["KMP_BLOCKTIME"] == "5"


# --- cores ---------------------------------------------------------------------------------------


def write_topology(folder: Path, siblings: dict[int, str]) -> None:
    for core, text in siblings.items():
        place = folder / f"cpu{core}" / "topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(f"{text}\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("ours", "siblings", "engine"),
    [
        ({0, 1}, {0: "0", 1: "1"}, {0}),
        ({0, 1, 2, 3}, {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}, {0, 2}),
        ({0, 1, 2, 3}, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, {0, 1}),
        ({2, 3, 5, 7}, {2: "2-3", 3: "2-3", 5: "4-5", 7: "6-7"}, {2, 5}),
        ({4, 5, 6, 7}, {}, {4, 5}),
        ({0, 1, 2}, {}, {0}),
        ({3}, {}, set()),
    ],
)
def test_engines_compute_on_half_of_our_cores_whole_ones_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ours: set[int],
    siblings: dict[int, str],
    engine: set[int],
) -> None:
    write_topology(tmp_path, siblings)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: ours)
    assert engine_cores(tmp_path) == engine


def test_all_arms_compute_on_the_same_cores() -> None:
    arms = [launch(config(), arm, cpu=True, together=3) for arm in (None, EAGLE, NGRAM)]
    assert {arm.cores for arm in arms} == {engine_cores()}


@pytest.mark.parametrize(
    "engine",
    [
        {"env": {"OMP_NUM_THREADS": "16"}},
        {"env": {"VLLM_CPU_OMP_THREADS_BIND": "0-7"}},
        {"args": {"distributed_executor_backend": "mp"}},
        {"args": {"tensor_parallel_size": 2}},
    ],
)
def test_who_places_threads_in_the_config_is_not_bound(engine: dict[str, Any]) -> None:
    assert launch(config(**engine), cpu=True).cores == frozenset()


def test_a_gpu_engine_is_not_bound() -> None:
    assert launch(config()).cores == frozenset()


TREE = """
import subprocess, sys, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
if len(sys.argv) < 2:
    subprocess.Popen([sys.executable, __file__, "engine"], stdin=subprocess.PIPE)
print("up", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core leaves nothing to choose")
def test_a_bound_engine_and_its_server_share_no_core(tmp_path: Path) -> None:
    script = tmp_path / "tree.py"
    script.write_text(TREE, encoding="utf-8")
    made = launch(config(), cpu=True)
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert [server.stdout.readline() for _ in range(2)] == [b"up\n"] * 2
        (engine,) = psutil.Process(server.pid).children()
        notes = bind(made, [server.pid, engine.pid])
        where = {
            pid: [os.sched_getaffinity(thread.id) for thread in psutil.Process(pid).threads()]
            for pid in (server.pid, engine.pid)
        }
        server.communicate()
    everywhere = os.sched_getaffinity(0)
    assert where[engine.pid] == [made.cores] * 2
    assert where[server.pid] == [everywhere - made.cores] * 2
    assert "core" in notes[0]


def test_an_engine_without_cores_of_its_own_is_left_where_it_is() -> None:
    before = os.sched_getaffinity(0)
    assert bind(launch(config()), [os.getpid()]) == ()
    assert os.sched_getaffinity(0) == before


def test_libraries_that_the_system_lacks_are_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a minimal Debian 13 vLLM only said that an operator has no attribute, after a minute."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "_C.abi3.so").touch()
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "lib" / "libc10.so").touch()
    ldd = tmp_path / "ldd"
    said = (
        "\\tlibnuma.so.1 => not found\\n\\tlibc10.so => not found\\n\\tlibc.so.6 => /lib/libc.so.6"
    )
    ldd.write_text(f"#!/bin/sh\nprintf '{said}\\n'\n", encoding="utf-8")
    ldd.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    names = vllm_names.recorded()
    found = Installation(Path("python"), tmp_path / "vllm", names, is_cpu=True, lacks_metadata=True)
    assert missing_libraries(found) == ["libnuma.so.1"]
    assert "apt-get install libnuma1" in lacks(["libnuma.so.1"])
    assert missing_libraries(replace(found, is_cpu=False)) == []
