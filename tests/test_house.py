"""The shape of the repository is itself a promise (docs: style.md's F)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from specbench import config, vllm_names

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "specbench"
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))

# Lowest first. A module may import from rows above its own, and within its own package.
LAYERS = [
    {"errors", "failures", "records", "vllm_names", "environment", "interrupts", "scratch"},
    {"fetch", "config", "run_document"},
    {"prompts", "analysis"},
    {"engines", "load", "store", "machine", "sweep", "demo", "telemetry"},
    {"triton", "models"},
    {"prepare", "render", "calibrate", "init", "doctor"},
    {"arms"},
    {"run", "whatif", "baseline", "interchange", "runs"},
    {"verify", "archive", "executors"},
    {"cli"},
    {"__main__"},
]


@pytest.mark.parametrize("folder", ["engine", "browser"])
def test_what_the_fast_part_does_not_look_at_is_all_marked(folder: str) -> None:
    """See `pytest_ignore_collect` in conftest.py."""
    for path in sorted(Path(__file__).with_name(folder).glob("test_*.py")):
        marks = [line for line in path.read_text().splitlines() if line.startswith("pytestmark")]
        assert len(marks) == 1, path
        assert "pytest.mark.engine" in marks[0], path


def imported(path: Path) -> set[str]:
    """The rooms of specbench that the file at *path* imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.ImportFrom(module="specbench", names=names):
                found |= {alias.name for alias in names if alias.name != "__version__"}
            case ast.ImportFrom(module=str(module)) if module.startswith("specbench."):
                found.add(module.split(".")[1])
    return found


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


MODULES = [p for p in sorted(PACKAGE.rglob("*.py")) if room(p) != "__init__"]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    place = next(i for i, layer in enumerate(LAYERS) if room(path) in layer)
    below = set().union(*LAYERS[:place]) | {room(path)}
    if place == 3:  # these are neighbours that use each other's names, never in a circle
        below |= LAYERS[3] - {"sweep"} if room(path) != "store" else set()
    if place == 0:
        below |= LAYERS[0]
    if place in (1, 2):
        below |= LAYERS[place] - {room(path)} if room(path) != "fetch" else set()
    assert imported(path) <= below


@pytest.mark.parametrize("folder", ["configs", "datasets", "results"])
def test_data_folders_hold_no_python(folder: str) -> None:
    """Python in ./datasets would hide the PyPI package of that name."""
    assert list((ROOT / folder).rglob("*.py")) == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_shipped_config_is_valid(path: Path) -> None:
    config.load(path)


def test_the_configs_that_the_documents_name_are_shipped() -> None:
    names = {"vanilla", "eagle_k5", "eagle3_k5", "draft_k5", "ngram_k5", "pr16035", "sweep", "demo"}
    names |= {"nightly"}
    assert names <= {path.stem for path in CONFIGS}


def test_every_method_of_the_recorded_vllms_is_accepted_in_a_config(tmp_path: Path) -> None:
    for method in sorted(vllm_names.recorded().methods):
        path = tmp_path / "c.yaml"
        text = f"model: m\nprompts: p\nspeculation: {{method: {method}, model: d, k: 1}}\n"
        path.write_text(text, encoding="utf-8")
        assert config.load(path).speculation[0].method == method


def test_help_imports_nothing_heavy() -> None:
    """`specbench --help` must feel instant: benchmarks/help_time.py has the figures."""
    code = """
import sys
from specbench.cli import app
try:
    app(["--help"])
except SystemExit:
    pass
heavy = {"pydantic", "yaml", "numpy", "pandas", "torch", "vllm", "datasets", "httpx", "psutil"}
print("heavy:", sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("heavy: []")
