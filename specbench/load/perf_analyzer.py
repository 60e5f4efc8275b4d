"""perf_analyzer, GenAI-Perf's engine: a program for glibc 2.38 and newer, run on older systems too.

The binary is taken out of its wheel, whatever pip would choose here (on an older glibc that is a
placeholder without one). On a newer system it runs as it is. On an older one `fix` unpacks a newer
C library of the same distribution into a folder of ours, from the mirror that this machine is set
up with, and wraps the binary in a script that starts it with that library's loader. Nothing of
the system's is touched.

    CACHE/tools/perf-analyzer-2.60.0/bin/perf_analyzer   the program or the script, to be put on PATH
    CACHE/tools/perf-analyzer-2.60.0/debs/               the unpacked C library, where it is needed
"""

import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from specbench.environment import for_installers
from specbench.errors import LoadError
from specbench.fetch import cache_dir, fetch_member

VERSION = "2.60.0"
NEEDS_GLIBC = (2, 38)
MEMBER = "perf_analyzer/bin/perf_analyzer"
SHA256 = {
    "x86_64": "ccc6220d9a4b0485b853ab40fe012d2a5d9c55f1e55835f6a8eb8b552d6c49c6",
    "aarch64": "83bda0e694cf29ca208cc5fef77aed606bb082cedd36da24f09d1f81a2c5c84c",
}
# The oldest release of each distribution whose glibc is new enough (Debian 13: 2.41, Ubuntu 24.04:
# 2.39) and the packages that hold the libraries that `objdump -p perf_analyzer` names.
NEWER_SUITE = {"debian": "trixie", "ubuntu": "noble"}
PACKAGES = ("libc6", "libstdc++6", "libgcc-s1", "libssl3t64", "zlib1g", "libzstd1")
WAYS_OUT = (
    "Ways out: `specbench doctor --fix-perf-analyzer` (a newer C library in a folder of its own, "
    "the system's stays as it is), `load.client=aiperf`, or `load.client=direct`."
)


def glibc() -> tuple[int, int] | None:
    """The version of this machine's glibc; None where it has another C library."""
    name, version = platform.libc_ver()
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if name == "glibc" and found else None


def runs_as_it_is() -> bool:
    """Whether this machine's C library is new enough."""
    here = glibc()
    return here is not None and here >= NEEDS_GLIBC


def folder() -> Path:
    """Where the program is, or would be."""
    return cache_dir() / "tools" / f"perf-analyzer-{VERSION}"


def find() -> Path | None:
    """The folder to put on PATH, if the program is there."""
    bin = folder() / "bin"
    return bin if os.access(bin / "perf_analyzer", os.X_OK) else None


def require(*, say: Callable[[str], None] = lambda _: None) -> Path:
    """The folder to put on PATH, the program fetched if need be.

    Raises:
        LoadError: it does not run on this machine's C library and `fix` was not asked for.
    """
    if (found := find()) is not None:
        return found
    if not runs_as_it_is():
        raise LoadError(why_not(), hint=WAYS_OUT)
    _place(lambda binary, bin: shutil.copy2(binary, bin / "perf_analyzer"), say)
    return folder() / "bin"


def why_not() -> str:
    """Why the program does not run here, in a sentence."""
    here = glibc()
    has = f"has {here[0]}.{here[1]}" if here else "has another C library"
    wants = ".".join(map(str, NEEDS_GLIBC))
    return f"GenAI-Perf's perf_analyzer {VERSION} needs glibc {wants} or newer; this machine {has}."


def fix(*, say: Callable[[str], None] = lambda _: None) -> Path:
    """Make the program run on an older system; the folder to put on PATH.

    Raises:
        LoadError: this is no Debian or Ubuntu, or its mirror does not give the packages.
    """
    if runs_as_it_is() or find() is not None:
        return require(say=say)

    def wrap(binary: Path, bin: Path) -> None:
        debs = bin.parent / "debs"
        _unpack_newer_libraries(debs, say)
        real = bin.parent / "perf_analyzer.real"
        shutil.copy2(binary, real)
        real.chmod(0o755)
        (bin / "perf_analyzer").write_text(_script(debs, real, folder()), encoding="utf-8")

    _place(wrap, say)
    return folder() / "bin"


def _place(put: Callable[[Path, Path], object], say: Callable[[str], None]) -> None:
    """Have *put* make bin/perf_analyzer out of the binary in a draft folder; check it; rename."""
    machine = platform.machine()
    if machine not in SHA256:
        raise LoadError(f"There is no perf_analyzer for {machine}.", hint=WAYS_OUT)
    tag = f"manylinux_{NEEDS_GLIBC[0]}_{NEEDS_GLIBC[1]}_{machine}"
    binary = fetch_member("perf-analyzer", VERSION, MEMBER, SHA256[machine], platform=tag, say=say)
    target = folder()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".perf-analyzer-", dir=target.parent) as made:
        draft = Path(made, target.name)
        (draft / "bin").mkdir(parents=True)
        put(binary, draft / "bin")
        (draft / "bin" / "perf_analyzer").chmod(0o755)
        shutil.rmtree(target, ignore_errors=True)
        draft.replace(target)
    try:
        check(target / "bin")
    except LoadError:
        shutil.rmtree(target, ignore_errors=True)
        raise


def check(bin: Path) -> None:
    """Start the program in *bin* once.

    Raises:
        LoadError: it does not start.
    """
    try:
        done = subprocess.run(
            [bin / "perf_analyzer", "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=30,
            env=for_installers(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LoadError(f"{bin}/perf_analyzer does not start: {error}.", hint=WAYS_OUT) from None
    said = (done.stdout + done.stderr).decode(errors="replace").strip()
    if done.returncode or "Perf Analyzer" not in said:  # of its version it only knows the commit
        last = said.splitlines()[-1] if said else f"exit code {done.returncode}"
        raise LoadError(f"{bin}/perf_analyzer does not start: {last}.", hint=WAYS_OUT)


def _script(debs: Path, real: Path, final: Path) -> str:
    """A shell script that starts *real* by the loader in *debs*; paths are those under *final*."""
    loader = next(iter(sorted(debs.rglob("ld-linux-*.so.*"))), None)
    if loader is None:
        raise LoadError("libc6 came without a loader.", hint=WAYS_OUT)
    libraries = sorted({path.parent for path in debs.rglob("*.so*") if "lib" in path.parts})
    there = [str(final / path.relative_to(real.parent)) for path in (loader, real, *libraries)]
    quoted = [f"'{path}'" for path in there]
    search = ":".join(there[2:])
    return f"#!/bin/sh\nexec {quoted[0]} --library-path '{search}' {quoted[1]} \"$@\"\n"


# --- the newer C library --------------------------------------------------------------------------


def _unpack_newer_libraries(into: Path, say: Callable[[str], None]) -> None:
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise LoadError(
                f"A newer C library is taken from Debian's or Ubuntu's packages, and this machine has no "
                f"{program}.",
                hint=WAYS_OUT,
            )
    system = os_release()
    suite = NEWER_SUITE.get(system.get("ID", ""))
    if suite is None:
        name = system.get("PRETTY_NAME", "this system")
        raise LoadError(f"There is no recipe for {name}.", hint=WAYS_OUT)
    sources = newer_source(_sources(), system.get("VERSION_CODENAME", ""), suite)
    if sources is None:
        raise LoadError("No package mirror is set up in /etc/apt.", hint=WAYS_OUT)
    say(
        f"Fetching {', '.join(PACKAGES)} of {suite} into {folder()} (the system's stay as they are)"
    )
    with tempfile.TemporaryDirectory(prefix="specbench-apt-") as work:
        _download(Path(work), sources)
        for deb in sorted(Path(work).glob("*.deb")):
            _run(["dpkg-deb", "-x", str(deb), str(into)], Path(work))


def os_release() -> Mapping[str, str]:
    """What /etc/os-release says; empty where there is none."""
    try:
        return platform.freedesktop_os_release()
    except OSError:
        return {}


def _sources() -> list[str]:
    """The texts of apt's own source files."""
    places = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
    found = sorted(path for path in places if path.suffix in (".list", ".sources"))
    return [path.read_text(encoding="utf-8", errors="replace") for path in found if path.is_file()]


def newer_source(texts: Iterable[str], codename: str, suite: str) -> str | None:
    """A one-line apt source like the machine's own for *codename*, but for *suite*.

    Both of apt's formats are read: a line `deb [options] URI codename main`, and stanzas of
    `Types`, `URIs`, `Suites`, `Signed-By`. None where neither has the distribution itself.
    """
    for text in texts:
        for line in text.splitlines():
            found = re.match(rf"deb\s+(\[[^]]*\]\s+)?(\S+)\s+{re.escape(codename)}\s", line)
            if found:
                return f"deb {found[1] or ''}{found[2]} {suite} main\n"
        for stanza in re.split(r"\n\s*\n", text):
            fields = dict(re.findall(r"^([A-Za-z-]+):[ \t]*(.+)$", stanza, re.MULTILINE))
            if codename in fields.get("Suites", "").split() and fields.get("URIs"):
                signed = fields.get("Signed-By", "").strip()
                options = f"[signed-by={signed}] " if signed.startswith("/") else ""
                return f"deb {options}{fields['URIs'].split()[0]} {suite} main\n"
    return None


def _download(work: Path, sources: str) -> None:
    """Have apt-get fetch the packages into *work*, with state, cache and sources of its own."""
    (work / "sources.list").write_text(sources, encoding="utf-8")
    for name in ("lists/partial", "cache/archives/partial"):
        (work / name).mkdir(parents=True)
    (work / "status").touch()
    options = {
        "Dir::Etc::sourcelist": work / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::Lists": work / "lists",
        "Dir::State::status": work / "status",
        "Dir::Cache": work / "cache",
        "APT::Sandbox::User": "root",
    }
    flags = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
    _run(["apt-get", "-q", *flags, "update"], work)
    _run(["apt-get", "-q", *flags, "download", *PACKAGES], work)


def _run(argv: list[str], cwd: Path) -> None:
    done = subprocess.run(
        argv,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        env=for_installers(),
    )
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        raise LoadError(
            f"{argv[0]} failed: {said[-1] if said else f'exit code {done.returncode}'}.",
            hint=f"Tried: {' '.join(argv)}. {WAYS_OUT}",
        )
