"""The life of a child process: started behind a guard, watched, and never left behind."""

import json
import mmap
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from specbench.engines import guard
from specbench.environment import SECRET
from specbench.errors import EngineError

# What a child may know of our environment. Secrets (HF_TOKEN apart, which the engine needs to
# fetch gated weights) and whatever else the user's shell exports stay out.
ALLOWED_ENVIRONMENT = re.compile(
    r"^(PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TZ|TMPDIR|XDG_\w+|LD_LIBRARY_PATH|LD_PRELOAD"
    r"|CUDA\w*|NVIDIA_\w+|NCCL_\w+|HIP_\w+|ROCR?_\w+|VLLM_\w+|HF_\w+|HUGGING_FACE_\w+"
    r"|TRANSFORMERS_\w+|TOKENIZERS_\w+|TORCH\w*|PYTORCH_\w+|TRITON_\w+|OMP_\w+|MKL_\w+|KMP_\w+"
    r"|OPENBLAS_\w+|NUMBA_\w+|GOMP_\w+|MALLOC_\w+|CC|CXX|SSL_CERT_\w+|REQUESTS_CA_BUNDLE"
    r"|\w+_proxy|\w+_PROXY|SPECBENCH_CACHE)$"
)
SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
STOP_PATIENCE_S = 20.0


def allowed_environment() -> dict[str, str]:
    """The part of our own environment that a child gets."""
    return {k: v for k, v in os.environ.items() if ALLOWED_ENVIRONMENT.match(k)}


def log_tail(log: Path, lines: int = 40) -> str:
    """The last lines of a log, control characters taken out."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 64_000))
        text = file.read().decode("utf-8", "replace")
        clean = re.sub(r"\x1b\[[0-9;]*[A-Za-z]|[^\n\t\x20-\x7e\x80-\U0010ffff]", "", text)
        return "\n".join(clean.strip().splitlines()[-lines:])
    return ""


def withhold(log: Path, secrets: Sequence[str]) -> None:
    """Put asterisks over *secrets* in *log*, in place: a program may print its environment."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(log.open("r+b"))
            text = stack.enter_context(mmap.mmap(file.fileno(), 0))
        except (OSError, ValueError):  # it is not there, or empty
            return
        for secret in map(os.fsencode, secrets):
            at = text.find(secret)
            while at >= 0:
                text[at : at + len(secret)] = b"*" * len(secret)
                at = text.find(secret, at + len(secret))


class Child:
    """A running child, as a context manager: leaving it ends the child and all it started.

    Standard output and error go to *log*. *cwd* should be a folder of the run, so that a stray
    module beside the user's shell can't shadow one of the child's. With *prefork* the child is
    forked from a process that has imported vLLM already, and argv is that of vLLM's command line.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log: Path,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        patience_s: float = STOP_PATIENCE_S,
        prefork: "PreforkServer | None" = None,
    ) -> None:
        self.argv, self.log, self.cwd = list(argv), log.absolute(), cwd.absolute()
        self.env = {**allowed_environment(), **(env or {})}
        self._secrets = [v for k, v in self.env.items() if SECRET.search(k) and len(v) >= 8]
        self.patience_s, self._prefork = patience_s, prefork
        self.pid = 0
        self._status: int | None = None
        self._said = b""
        self._guard: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def __enter__(self) -> Self:
        """Start the child.

        Raises:
            EngineError: the program is not there or may not be run.
        """
        ours, theirs = socket.socketpair()
        self._control = ours
        if self._prefork is not None:
            theirs.close()
            ours.close()
            self._control = self._prefork.connect(self)
        else:
            with self.log.open("ab") as out, theirs:
                fd = theirs.fileno()
                guarded = ["-I", guard.__file__, f"{self.patience_s:g}", str(fd), "--", *self.argv]
                self._guard = subprocess.Popen(
                    [sys.executable, *guarded],
                    stdin=fd,
                    stdout=out,
                    stderr=out,
                    cwd=self.cwd,
                    env=self.env,
                    start_new_session=True,
                    pass_fds=(fd,),
                )
        self._control.settimeout(30)
        word, _, rest = self._line().partition(" ")
        if word != "pid":
            self.stop()
            raise EngineError(f"{self.argv[0]} could not be started: {word} {rest}", log=self.log)
        self.pid = int(rest)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        if self._status is None and self._control is not None:
            self._control.settimeout(0)
            with suppress(BlockingIOError):
                self._read_status()
        return self._status

    def pids(self) -> list[int]:
        """The child and everything it started that still lives."""
        return [self.pid, *guard.descendants(self.pid)] if self.pid else []

    def ask_to_stop(self) -> None:
        """Have the guard end the child, and do not wait: several children can end side by side."""
        if self._control is not None:
            with suppress(OSError):
                self._control.shutdown(socket.SHUT_WR)

    def stop(self) -> None:
        """End the child and all its descendants; returns when they are gone."""
        if self._control is None:
            return
        self.ask_to_stop()
        try:
            self._control.settimeout(self.patience_s + 15)
            while self._status is None:
                self._read_status()
        except TimeoutError:
            for pid in reversed(self.pids()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._control.close()
        self._control = None
        if self._guard is not None:
            with suppress(subprocess.TimeoutExpired):
                self._guard.wait(5)
            if self._guard.poll() is None:
                self._guard.kill()
                self._guard.wait()
        withhold(self.log, self._secrets)

    def _read_status(self) -> None:
        word, _, rest = self._line().partition(" ")
        self._status = int(rest) if word == "exit" else 128 + signal.SIGKILL
        withhold(self.log, self._secrets)  # before anyone quotes its last words

    def _line(self) -> str:
        """The next line from the guard; empty when it is gone."""
        assert self._control is not None
        while b"\n" not in self._said:
            try:
                piece = self._control.recv(4096)
            except ConnectionError:
                piece = b""
            if not piece:
                return ""
            self._said += piece
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()

    def failed(self, message: str, *, hint: str | None = None) -> EngineError:
        """An error about this child with the end of its log."""
        withhold(self.log, self._secrets)
        where = f"The whole log: {self.log}"
        return EngineError(
            message,
            log=self.log,
            tail=log_tail(self.log),
            hint=f"{hint} {where}" if hint else where,
        )


class PreforkServer:
    """A process that has imported vLLM once; see prefork.py. A context manager."""

    def __init__(
        self, python: Path, *, env: Mapping[str, str], log: Path, timeout_s: float = 300
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="specbench-")
        self._socket = Path(self._folder.name, "prefork")
        script = Path(__file__).with_name("prefork.py")
        argv = [str(python), str(script), str(self._socket)]
        env = {**env, "PYTHONSAFEPATH": "1"}  # this folder's vllm.py is not vLLM
        self._child = Child(argv, log=log, cwd=Path(self._folder.name), env=env, patience_s=1)
        self._timeout_s = timeout_s

    def __enter__(self) -> Self:
        self._child.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._child.stop()
        self._folder.cleanup()

    def ready(self) -> bool:
        """Whether it has imported vLLM.

        Raises:
            EngineError: it died on the way.
        """
        if (code := self._child.poll()) is not None:
            raise self._child.failed(
                f"Importing vLLM failed with status {code}.",
                hint="engine.prefork: false starts each engine by itself.",
            )
        return self._socket.exists()

    def connect(self, child: Child) -> socket.socket:
        """Have *child* forked; the connection that keeps it alive."""
        connection = socket.socket(socket.AF_UNIX)
        request = {
            "argv": child.argv,
            "env": child.env,
            "cwd": str(child.cwd),
            "log": str(child.log),
            "patience_s": child.patience_s,
        }
        try:
            connection.connect(str(self._socket))
            connection.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise self._child.failed(f"The process that imported vLLM is gone: {error}.") from None
        return connection
