"""A vLLM engine as our child: started, watched until it is ready, ended.

`installation` says which vLLM that is, `launch` how its command line reads, `server` what it
answers once it is up.
"""

import contextlib
import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import psutil

from specbench import machine
from specbench.engines.installation import Installation, metadata_environment
from specbench.engines.launch import Launch, bind
from specbench.engines.process import Child, PreforkServer
from specbench.engines.server import Server
from specbench.environment import SECRET
from specbench.errors import EngineError
from specbench.records import EngineFacts

LOADING_TOOK = re.compile(r"Model loading took ([0-9.]+) GiB")
PREFORKED = "forked from a process that had imported vLLM; startup_s leaves the import out"


@dataclass
class StartingEngine:
    """One engine on its way up, as a context manager; leaving it ends the engine.

    Several can start side by side: enter each, then `poll` them in turns.
    """

    launch: Launch
    installation: Installation
    arm: str
    start: int
    folder: Path
    startup_timeout_s: float
    prefork: PreforkServer | None = None
    clock: Callable[[], float] = time.monotonic

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._lost_ports: list[int] = []
        self._start()
        return self

    def _start(self) -> None:
        """Start the engine on a port that is free now."""
        self._port, key = free_port(), secrets.token_urlsafe(24)
        name = f"specbench-{secrets.token_hex(4)}"
        self.server = Server(f"http://127.0.0.1:{self._port}", name, key)
        address = ("--host", "127.0.0.1", "--port", str(self._port), "--served-model-name", name)
        self._argv = (*self.launch.argv, *address)
        self._env = {**self.launch.env, "VLLM_API_KEY": key}
        self._env |= metadata_environment(self.installation)
        log = self.folder / "engine.log"
        self._started = self.clock()
        # A fork is handed vLLM's own arguments: what stands behind `python -m MODULE`.
        argv = self._argv[3:] if self.prefork else self._argv
        self.child = Child(argv, log=log, cwd=self.folder, env=self._env, prefork=self.prefork)
        self.child.__enter__()

    def __exit__(self, *_: object) -> None:
        self.child.stop()
        self.server.close()

    def poll(self) -> EngineFacts | None:
        """The engine's facts once it is ready, None while it is not.

        Where another process has taken its port, it is started once more, on another one.

        Raises:
            EngineError: it exited, ran out of time, or something else answers on its port.
        """
        try:
            return self._look()
        except EngineError as error:
            if error.failure != "port_taken" or self._lost_ports:
                raise
        self._lost_ports.append(self._port)
        self.__exit__()
        self._start()
        return None

    def _look(self) -> EngineFacts | None:
        if (code := self.child.poll()) is not None:
            raise self.child.failed(
                f"The engine of {self.arm} exited with status {code} before it was ready.",
                "exited_before_ready",
                hint="If it starts by hand, try engine.prefork: false." if self.prefork else None,
            )
        waited_s = self.clock() - self._started
        if not self.server.healthy():
            if waited_s > self.startup_timeout_s:
                raise self.child.failed(
                    f"The engine of {self.arm} was not ready after {self.startup_timeout_s:g} s.",
                    "not_ready_in_time",
                    hint="If it was still loading, raise engine.startup_timeout_s.",
                )
            return None
        _must_be_ours(self.server, self.child, self._port)
        bound = bind(self.launch, self.child.pids())
        return EngineFacts(
            arm=self.arm,
            start=self.start,
            kind="vllm",
            version=self.server.version() or self.installation.version,
            url=self.server.url,
            served_model=self.server.served_model,
            argv=self._argv,
            env={k: v for k, v in self._env.items() if not SECRET.search(k)},
            pid=self.child.pid,
            startup_s=round(waited_s, 3),
            kv_cache_tokens=self.server.kv_cache_tokens(),
            memory_bytes=_memory_bytes(self.child),
            weights_bytes=_weights_bytes(self.child.log),
            log=self.child.log.name,
            machine=machine.hardware(),
            host=socket.gethostname(),
            started_at=self._started_at,
            notes=(
                *self.launch.notes,
                *bound,
                *((PREFORKED,) if self.prefork else ()),
                *(f"another process took port {port} first" for port in self._lost_ports),
            ),
        )


def prefork_server(launch: Launch, installation: Installation, log: Path) -> PreforkServer:
    """A process that imports vLLM once for many engines with *launch*'s environment."""
    env = {**launch.env, **metadata_environment(installation)}
    return PreforkServer(installation.python, env=env, log=log)


def starts_at_once(installation: Installation) -> int:
    """How many engines may start side by side.

    One on a GPU: each measures the free memory there as it starts. On a CPU as many as there
    are cores, because most of a start is one thread importing.
    """
    return len(os.sched_getaffinity(0)) if installation.is_cpu else 1


def free_port() -> int:
    """A port that nothing listens on now. `poll` sees to a race for it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _memory_bytes(child: Child) -> int | None:
    """The host memory that is the child's processes' own (USS): what a fork shares is not."""
    total = 0
    for pid in child.pids():
        with contextlib.suppress(psutil.Error):
            total += int(psutil.Process(pid).memory_full_info().uss)
    return total or None


def _weights_bytes(log: Path) -> int | None:
    """What the engine logs of the device memory that loading took, all its workers together."""
    with contextlib.suppress(OSError):
        found = LOADING_TOOK.findall(log.read_text(encoding="utf-8", errors="replace"))
        return int(sum(float(gib) for gib in found) * (1 << 30)) or None
    return None


def _must_be_ours(server: Server, child: Child, port: int) -> None:
    """Raise unless what answers on *port* is the child that we started."""
    listeners = _listeners(port)
    is_ours = bool(listeners & set(child.pids()))
    if listeners and not is_ours:
        raise child.failed(f"Another process took port {port} before the engine did.", "port_taken")
    if server.served_model not in (models := server.models()):
        serves = f"serves {', '.join(models)[:200]}" if models else "names no model"
        raise child.failed(
            f"What answers on port {port} is not the engine that was started: it {serves}.",
            "wrong_model" if is_ours else "port_taken",
        )


def _listeners(port: int) -> set[int]:
    """The processes that listen on *port*, of those that we may look at."""
    found: set[int] = set()
    with contextlib.suppress(psutil.Error):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port:
                found |= {one.pid} if one.pid is not None else set()
    return found
