"""The life of a child process: started behind a guard, watched, and never left behind."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from specbench.engines import guard
from specbench.engines.oom import OomWatch
from specbench.environment import SECRET
from specbench.errors import EngineError
from specbench.failures import LESS_HOST, Cause, Failure, cause_in
from specbench.scratch import scratch

# What a child may know of our environment. Secrets (HF_TOKEN apart, which the engine needs to
# fetch gated weights) and whatever else the user's shell exports stay out.
ALLOWED_ENVIRONMENT = re.compile(
    r"^(PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TZ|TMPDIR|XDG_\w+|LD_LIBRARY_PATH|LD_PRELOAD"
    r"|CUDA\w*|NVIDIA_\w+|NCCL_\w+|HIP_\w+|ROCR?_\w+|VLLM_\w+|HF_\w+|HUGGING_FACE_\w+"
    r"|TRANSFORMERS_\w+|TOKENIZERS_\w+|TORCH\w*|PYTORCH_\w+|TRITON_\w+|OMP_\w+|MKL_\w+|KMP_\w+"
    r"|OPENBLAS_\w+|NUMBA_\w+|GOMP_\w+|MALLOC_\w+|CC|CXX|SSL_CERT_\w+|REQUESTS_CA_BUNDLE"
    r"|\w+_proxy|\w+_PROXY|SPECBENCH_CACHE)$"
)
MARK = "SPECBENCH_CHILD"  # in the environment of all that descends from a child
STOP_PATIENCE_S = 6.0  # then KILL: nothing of an engine is left 10 s after whatever ends us
KILLED = 128 + signal.SIGKILL
LOG_END = 64_000  # bytes that are looked at
# vllm/v1/executor/multiproc_executor.py, v1/utils.py: a worker, or the engine core, is gone
WORKER_KILLED = re.compile(r"died unexpectedly|exit code: -9|EngineCore encountered an issue")


def allowed_environment() -> dict[str, str]:
    """The part of our own environment that a child gets."""
    return {k: v for k, v in os.environ.items() if ALLOWED_ENVIRONMENT.match(k)}


def log_tail(log: Path, lines: int = 40, *, begin: int = 0) -> str:
    """The last lines of a log behind byte *begin*, control characters taken out."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(begin, file.tell() - LOG_END))
        text = file.read().decode("utf-8", "replace")
        clean = re.sub(r"\x1b\[[0-9;]*[A-Za-z]|[^\n\t\x20-\x7e\x80-\U0010ffff]", "", text)
        return "\n".join(clean.strip().splitlines()[-lines:])
    return ""


class Child:
    """A running child, as a context manager: leaving it ends the child and all it started.

    Standard output and error go to *log*. *cwd* should be a folder of the run, so that a stray
    module beside the user's shell can't shadow one of the child's. What it started may end *linger_s*
    after it. With *prefork* the child is forked from a process that has imported vLLM already, and
    argv is that of vLLM's command line.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log: Path,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        patience_s: float = STOP_PATIENCE_S,
        linger_s: float = 0,
        prefork: "PreforkServer | None" = None,
    ) -> None:
        self.argv, self.log, self.cwd = list(argv), log.absolute(), cwd.absolute()
        self._mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        self.env = {**allowed_environment(), **(env or {}), MARK: self._mark}
        self._secrets = {k: v for k, v in self.env.items() if SECRET.search(k) and len(v) >= 8}
        self._oom, self._log_begin = OomWatch(), 0
        self.patience_s, self._linger_s, self._prefork = patience_s, linger_s, prefork
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
        self.forget_log()
        guard.become_subreaper()
        ours, theirs = socket.socketpair()
        self._control = ours
        if self._prefork is not None:
            theirs.close()
            ours.close()
            self._control = self._prefork.connect(self)
        else:
            with self.log.open("ab") as out, theirs:
                fd = theirs.fileno()
                waits = (f"{self.patience_s:g}", f"{self._linger_s:g}")
                guarded = ["-I", guard.__file__, *waits, str(fd)]
                guarded += [",".join(self._secrets), "--", *self.argv]
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
        self._oom.look(self.pid)
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
            if self._status is None:
                self._oom.look(self.pid)
        return self._status

    @property
    def secrets(self) -> list[str]:
        """What must not be left in its log."""
        return list(self._secrets.values())

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
            self._control.settimeout(self.patience_s + self._linger_s + 15)
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
        self._cover_log()

    def _cover_log(self) -> None:
        """The guard does so too when all is over; but it may have been killed."""
        guard.cover(self.log, self._secrets.values())

    def _read_status(self) -> None:
        word, _, rest = self._line().partition(" ")
        self._status = int(rest) if word == "exit" else KILLED
        if word != "exit":
            self._end_orphans()
        self._cover_log()  # before anyone quotes its last words

    def _end_orphans(self) -> None:
        """The guard was killed, and the kernel ended the child: what the child had started came to us."""
        marked = f"{MARK}={self._mark}".encode()
        for pid in guard.descendants(os.getpid()):
            with suppress(OSError):
                if marked in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    os.kill(pid, signal.SIGKILL)

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

    def forget_log(self) -> None:
        """What the log says so far has no part in what goes wrong from now on."""
        with suppress(OSError):
            self._log_begin = self.log.stat().st_size

    def cause(self) -> Cause | None:
        """Why it is in trouble, as far as its log and the kernel tell."""
        log = log_tail(self.log, 400, begin=self._log_begin)
        cause = cause_in(log)
        if cause is None or cause.failure == "engine_core_dead":
            is_killed = self._status == KILLED or WORKER_KILLED.search(log)
            if is_killed and self._oom.kills():
                said = "the kernel's out-of-memory killer ended it"
                return Cause("out_of_memory", said, LESS_HOST)
        return cause

    def failed(
        self, message: str, failure: Failure = "not_started", *, hint: str | None = None
    ) -> EngineError:
        """An error about this child with the end of its log; its cause goes before *failure*."""
        self._cover_log()
        cause = self.cause()
        if cause is not None:
            message = f"{message.removesuffix('.')}: {cause.line.removesuffix('.')}."
        where = f"The whole log: {self.log}"
        return EngineError(
            message,
            failure=cause.failure if cause else failure,
            log=self.log,
            tail=log_tail(self.log, begin=self._log_begin),
            advice=cause.advice if cause else None,
            hint=f"{hint} {where}" if hint else where,
        )


class PreforkServer:
    """A process that has imported vLLM once; see prefork.py. A context manager."""

    def __init__(
        self, python: Path, *, env: Mapping[str, str], log: Path, timeout_s: float = 300
    ) -> None:
        self._stack = ExitStack()
        folder = self._stack.enter_context(scratch("prefork"))
        self._socket = folder / "prefork"
        script = Path(__file__).with_name("prefork.py")
        argv = [str(python), str(script), str(self._socket)]
        env = {**env, "PYTHONSAFEPATH": "1"}  # this folder's vllm.py is not vLLM
        # Where specbench was killed, the engines' own guards end them and cover their logs.
        self._child = Child(
            argv,
            log=log,
            cwd=folder,
            env=env,
            patience_s=1,
            linger_s=STOP_PATIENCE_S + 2,
        )
        self._timeout_s = timeout_s

    def __enter__(self) -> Self:
        self._child.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._child.stop()
        self._stack.close()

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
            "secrets": child.secrets,
        }
        try:
            connection.connect(str(self._socket))
            connection.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise self._child.failed(f"The process that imported vLLM is gone: {error}.") from None
        return connection
