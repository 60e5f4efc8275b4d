"""An engine whose acceptance is held: what it is given, and when it is not asked."""

from dataclasses import replace
from pathlib import Path

import pytest

from specbench import config, whatif
from specbench.engines.installation import Installation
from specbench.errors import UserError
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
