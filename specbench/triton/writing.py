"""A model repository on the disk: written whole or not at all, nobody else's models touched."""

import hashlib
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbench import __version__
from specbench.environment import SECRET
from specbench.errors import StoreError, UserError
from specbench.triton.paths import HUB_CACHE
from specbench.triton.repository import Repository
from specbench.triton.versions import Container

MARK = "specbench.json"  # beside the models; Triton looks at folders only
FORMAT = 1


def mark_of(folder: Path) -> dict[str, Any] | None:
    """What specbench noted of the repository in *folder*; None if it did not write it.

    Raises:
        UserError: the note is there and cannot be read.
    """
    try:
        found = json.loads((folder / MARK).read_text(encoding="utf-8"))
        dict(found["models"]), dict(found["mounts"])
    except OSError:
        return None
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{folder / MARK} is not what specbench wrote there.", hint="Delete that file."
        ) from None
    return dict(found)


def write(
    repository: Repository,
    folder: Path,
    *,
    config_path: Path | str,
    triton: str | None,
    vllm: str,
    force: bool = False,
) -> None:
    """Put the models into *folder*: a new one, or one that specbench wrote and nobody changed.

    With *force* models of the same names are replaced whoever wrote them; others always stay.

    Raises:
        UserError: *folder* holds something else.
        StoreError: the disk is full or read-only; nothing half-written stays.
    """
    folder = folder.absolute()
    before = _before(repository, folder, force=force)
    mark = {
        "format": FORMAT,
        "written_by": f"specbench {__version__}",
        "config": str(config_path),
        "triton": triton,
        "vllm": vllm,
        "mounts": {inside: str(path) for inside, path in repository.mounts.folders.items()},
        "models": {
            model.name: {
                "arm": model.arm,
                "sha256": {path: _sha256(text.encode()) for path, text in model.files().items()},
            }
            for model in repository.models
        },
    }
    draft: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        draft.chmod(0o755)
        for model in repository.models:
            for path, text in model.files().items():
                _write_file(draft / model.name / path, text)
        _write_file(draft / MARK, json.dumps(mark, indent=1) + "\n")
        _into_place(draft, folder, stale=before - {model.name for model in repository.models})
    except OSError as error:
        raise StoreError(f"{folder} can't be written: {error.strerror}.") from None
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)


def _before(repository: Repository, folder: Path, *, force: bool) -> set[str]:
    """The models in *folder* that an earlier call wrote.

    Raises:
        UserError: something there is not ours to replace.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; a model repository is a folder.")
    there = sorted(os.listdir(folder)) if folder.is_dir() else []
    if not there:
        return set()
    mark = mark_of(folder)
    if mark is None:
        if not force:
            raise UserError(
                f"{folder} is not empty, and specbench did not write it.",
                hint="Choose another -o; --force replaces models of the same names only.",
            )
        return set()
    models: Mapping[str, Mapping[str, Any]] = mark["models"]
    changed = [
        f"{name}/{path}"
        for name, about in models.items()
        for path, sha256 in about["sha256"].items()
        if (file := folder / name / path).is_file() and _sha256(file.read_bytes()) != sha256
    ]
    foreign = [m.name for m in repository.models if m.name in there and m.name not in models]
    if (changed or foreign) and not force:
        what = f"{changed[0]} was changed" if changed else f"{foreign[0]} was put there"
        raise UserError(
            f"{folder}: {what} since specbench wrote it.",
            hint="Choose another -o; --force writes over it.",
        )
    return set(models)


def _into_place(draft: Path, folder: Path, *, stale: set[str]) -> None:
    """A new folder appears whole; in one that is there each model is exchanged whole."""
    if not folder.is_dir() or not os.listdir(folder):
        draft.rename(folder)  # also onto an empty folder
        return
    aside = Path(tempfile.mkdtemp(prefix="old.", dir=draft))
    for name in stale:
        if (folder / name).is_dir():
            (folder / name).rename(aside / name)
    for path in sorted(draft.iterdir()):
        if path.is_dir() and path != aside:
            if (folder / path.name).exists():
                (folder / path.name).rename(aside / path.name)
            path.rename(folder / path.name)
    (draft / MARK).replace(folder / MARK)


def _write_file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def server_line(repository: Repository, folder: Path) -> str:
    """The command that serves *folder* with a tritonserver of this machine, on 127.0.0.1 only."""
    kinds = ("http", "grpc", "metrics")
    return " \\\n    ".join(
        [
            f"tritonserver --model-repository={shlex.quote(str(folder.absolute()))}",
            f"--model-control-mode=explicit --load-model={repository.models[0].name}",
            " ".join(f"--{kind}-address=127.0.0.1" for kind in kinds),
        ]
    )


def docker_line(
    repository: Repository,
    folder: Path,
    container: Container,
    *,
    env: Mapping[str, str] | None = None,
) -> str:
    """The command that serves *folder* from NVIDIA's image, ready to paste into a shell.

    All ports are on 127.0.0.1: 8000 HTTP, 8001 gRPC, 8002 metrics. One model is loaded; the
    others are loaded and unloaded through the server's own requests.
    """
    first = repository.models[0]
    world = int(first.arguments.get("tensor_parallel_size") or 1)
    parts = ["docker run --rm --gpus all", f"--shm-size={world}g"]
    parts += ["--ulimit memlock=-1 --ulimit stack=67108864"]
    parts += [" ".join(f"-p 127.0.0.1:{port}:{port}" for port in (8000, 8001, 8002))]
    parts += [_mount(folder.absolute(), "/model_repository")]
    parts += [_mount(path, inside) for inside, path in sorted(repository.mounts.folders.items())]
    if repository.mounts.uses_hub:
        cache = '"${HF_HOME:-$HOME/.cache/huggingface}"'
        parts += [f"-v {cache}:{HUB_CACHE} -e HF_TOKEN"]
    for name, value in sorted((env or {}).items()):
        # A secret's value stays out of shell histories: docker takes it from the caller's own.
        parts += [f"-e {name}" if SECRET.search(name) else f"-e {shlex.quote(f'{name}={value}')}"]
    parts += [container.image]
    serve = "tritonserver --model-repository=/model_repository --model-control-mode=explicit"
    parts += [f"{serve} --load-model={first.name}"]
    return " \\\n    ".join(parts)


def _mount(path: Path, inside: str) -> str:
    return "-v " + shlex.quote(f"{path}:{inside}:ro")
