"""GenAI-Perf and AIPerf: each in an environment of its own, because their pins clash with vLLM's.

Made on first use in the user's cache folder from a lock file that lies beside this one, and used
without a network from then on:

    CACHE/tools/genai-perf-0.0.16-cp311/   the environment; `made.json` is written last
    CACHE/tools/perf-analyzer-2.60.0/      see perf_analyzer.py

A path that the user gives (`load.command`) is used instead, as it is.
"""

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from specbench.environment import for_installers, without_secrets
from specbench.errors import LoadError
from specbench.fetch import cache_dir, find_uv

CHECK_TIMEOUT_S = 60


@dataclass(frozen=True)
class Tool:
    """A load generator of somebody else's: its package (and command), the version that is pinned."""

    name: str
    version: str

    @property
    def lock(self) -> Path:
        """All of its packages with their versions, as pip takes them."""
        return Path(__file__).parent / "locks" / f"{self.name}.txt"


TOOLS = {tool.name: tool for tool in (Tool("genai-perf", "0.0.16"), Tool("aiperf", "0.13.0"))}


@dataclass(frozen=True)
class Installed:
    """A tool that is there. `folder` is that of its environment; None when the user named it."""

    tool: Tool
    command: Path
    version: str
    folder: Path | None = None


def check(installed: Installed) -> str:
    """Run the tool once; the version that it says.

    Raises:
        LoadError: it does not run.
    """
    return _version(installed.tool, installed.command)


def environment(tool: Tool) -> Path:
    """Where the tool's own environment is, or would be."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return cache_dir() / "tools" / f"{tool.name}-{tool.version}-{python}"


def find(tool: Tool, given: Path | None = None) -> Installed | None:
    """The tool where it is there already: at *given*, else in its environment. Nothing is made.

    Raises:
        LoadError: there is nothing at *given*, or it is not that tool.
    """
    if given is not None:
        found = shutil.which(given.expanduser())
        if found is None:
            raise LoadError(f"load.command: {given} is no program that can be run.")
        return Installed(tool, Path(found), _version(tool, Path(found)))
    folder = environment(tool)
    if _made_from(folder) != _fingerprint(tool):
        return None
    return Installed(tool, folder / "bin" / tool.name, tool.version, folder)


def require(
    tool: Tool, given: Path | None = None, *, say: Callable[[str], None] = lambda _: None
) -> Installed:
    """The tool, its environment made if need be (once, also when two processes ask at once).

    Raises:
        LoadError: it cannot be made or does not run; says what was tried.
    """
    if (found := find(tool, given)) is not None:
        return found
    folder = environment(tool)
    with _locked(folder):
        if (found := find(tool)) is None:  # else another process made it meanwhile
            say(f"Making an environment for {tool.name} {tool.version} in {folder}")
            _make(tool, folder)
            found = find(tool)
    assert found is not None
    return found


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(tool: Tool, folder: Path) -> None:
    """In place, because an environment cannot be moved; the mark that it is whole comes last."""
    shutil.rmtree(folder, ignore_errors=True)
    python = folder / "bin" / "python"
    if (uv := find_uv()) is not None:
        _carry_out(tool, [str(uv), "venv", "-q", "-p", sys.executable, str(folder)])
        install = [str(uv), "pip", "install", "-q", "--python", str(python)]
    else:
        venv.create(folder, with_pip=True)
        install = [str(python), "-m", "pip", "install", "-q"]
    _carry_out(tool, [*install, "--no-deps", "-r", str(tool.lock)])
    subprocess.run(  # byte code: without it the first run of the tool takes seconds longer
        [python, "-m", "compileall", "-q", "-j", "0", folder / "lib"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
        env=for_installers(),
    )
    version = _version(tool, folder / "bin" / tool.name)
    made = {"tool": tool.name, "version": version, "lock_sha256": _fingerprint(tool)}
    (folder / "made.json").write_text(json.dumps(made) + "\n", encoding="utf-8")


def _carry_out(tool: Tool, argv: Sequence[str]) -> None:
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, env=for_installers()
    )
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        raise LoadError(
            f"An environment for {tool.name} cannot be made: "
            f"{without_secrets(said[-1]) if said else 'no reason'}.",
            hint=f"Tried: {' '.join(argv)}. `load.command` takes one that you have.",
        )


def _version(tool: Tool, command: Path) -> str:
    """What the program at *command* says it is.

    Raises:
        LoadError: it does not run, or says nothing of a version.
    """
    try:
        done = subprocess.run(
            [command, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=CHECK_TIMEOUT_S,
            env={**for_installers(), "NO_COLOR": "1"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LoadError(f"{tool.name} at {command} does not run: {error}.") from None
    words = done.stdout.decode(errors="replace").split()
    versions = [word.lstrip("v") for word in words if word.lstrip("v")[:1].isdigit()]
    if done.returncode or not versions:
        said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        raise LoadError(
            f"{command} does not answer `--version` as {tool.name} does: "
            f"{said[-1] if said else f'exit code {done.returncode}'}."
        )
    return versions[-1]


def _fingerprint(tool: Tool) -> str:
    return hashlib.sha256(tool.lock.read_bytes()).hexdigest()


def _made_from(folder: Path) -> str | None:
    """The lock that a finished environment was made from."""
    try:
        made = json.loads((folder / "made.json").read_bytes())
    except (OSError, ValueError):
        return None
    return str(made.get("lock_sha256")) if isinstance(made, dict) else None
