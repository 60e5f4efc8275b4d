"""An engine whose acceptance is held: what it is given, and when it is not asked."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import console
import pytest

from specbench import config, whatif
from specbench.engines.installation import Installation
from specbench.errors import UserError
from specbench.records import Prompt
from specbench.store import RunStore
from specbench.vllm_names import recorded

CONFIG = """
model: m
prompts: he
repeats: 3
speculation:
  - {method: eagle, model: d, k: auto}
  - {method: ngram, k: 3, prompt_lookup_max: 4}
"""


@pytest.fixture
def settings(tmp_path: Path) -> config.Config:
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return config.load(path)


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation(Path("python"), tmp_path, recorded(), False, False)


def test_the_arm_is_held_at_the_length_and_called_synthetic(
    settings: config.Config, installation: Installation
) -> None:
    held = whatif.synthetic_config(settings, installation, label="eagle", k=4, tau=2.5)
    (arm,) = held.speculation
    assert (arm.label, arm.k, arm.choose_k, held.repeats) == ("synthetic-eagle", (4,), False, 1)
    assert arm.vllm_config(4) == {
        "method": "eagle",
        "model": "d",
        "num_speculative_tokens": 4,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2.5,
    }


def test_a_method_that_the_run_lacks_is_named(
    settings: config.Config, installation: Installation
) -> None:
    with pytest.raises(UserError, match="no method 'medusa'; there are: eagle, ngram"):
        whatif.synthetic_config(settings, installation, label="medusa", k=2, tau=2)


def test_a_vllm_without_synthetic_acceptance_is_not_asked(
    settings: config.Config, installation: Installation
) -> None:
    names = replace(recorded(), speculation_keys=frozenset({"method"}), version="0.11")
    old = replace(installation, names=names)
    with pytest.raises(UserError, match=r"vLLM 0\.11 cannot hold acceptance"):
        whatif.synthetic_config(settings, old, label="eagle", k=2, tau=2)


def test_a_cpu_build_that_asserts_is_not_asked_and_one_that_does_not_is(
    settings: config.Config, installation: Installation
) -> None:
    cpu = replace(installation, is_cpu=True)
    assert whatif.synthetic_config(settings, cpu, label="eagle", k=2, tau=2)
    kernels = cpu.package / "utils"
    kernels.mkdir()
    (kernels / "cpu_triton_utils.py").write_text(
        'assert not synthetic, "Synthetic acceptance not supported with CPU sampling"\n',
        encoding="utf-8",
    )
    with pytest.raises(UserError, match="on a CPU"):
        whatif.synthetic_config(settings, cpu, label="eagle", k=2, tau=2)


# --- by a run's step times -----------------------------------------------------------------------


@pytest.fixture
def looked_up(tmp_path: Path, run_in: Callable[..., RunStore]) -> Path:
    """A folder with a run of a head and of a look-up."""
    prompts = [Prompt(id=f"p/{i}", turns=(f"Say {i}",)) for i in range(8)]
    arms = {"eagle": (1, 3), "ngram": (3,)}
    run_in(tmp_path / "results", prompts, say=lambda *_: "one two three four " * 9, arms=arms)
    return tmp_path


def test_a_look_up_has_no_estimate_and_the_others_have(looked_up: Path) -> None:
    done = console.specbench("what-if", "--tau", "1.5", cwd=looked_up, columns=200)
    assert done.returncode == 0
    assert "eagle k=3 on he" in done.stdout
    assert "ngram" not in done.stdout
    assert "no estimate for ngram: ngram looks drafts up" in done.stderr


def test_a_look_up_alone_is_refused_with_the_reason(looked_up: Path) -> None:
    done = console.specbench(
        "what-if", "--tau", "1.5", "--method", "ngram", cwd=looked_up, columns=200
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "no estimate for ngram: ngram looks drafts up" in done.stderr


def test_a_look_up_has_no_break_even(looked_up: Path) -> None:
    done = console.specbench("report", "--format", "json", cwd=looked_up)
    rows = {row["arm"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["ngram-k3"]["break_even"] is None
    assert rows["ngram-k3"]["step_ms"] > 0
    assert rows["eagle-k3"]["break_even"] > 0
