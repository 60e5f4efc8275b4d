"""A Triton Inference Server with the vLLM backend: started or found, its models loaded one by one.

Explicit model control: a model is loaded, measured, and unloaded again; unloading is asynchronous, so
it is waited for. Ready means that the model answered a real request: its state says READY also where
the backend's Python cannot make a tensor (numpy 2 in the stub). Triton's metrics have no speculative
counters, so none are read.
"""

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import httpx

from specbench import machine
from specbench.engines import counters
from specbench.engines.bounded import Bounded
from specbench.engines.process import Child
from specbench.engines.vllm import free_port
from specbench.environment import SECRET
from specbench.errors import EngineError
from specbench.failures import Failure
from specbench.records import EngineCounters, EngineFacts

CONFIG_PBTXT = """\
# Written by specbench. Inputs and outputs are the backend's own and are filled in by it.
backend: "vllm"

# Which GPUs an engine uses is up to vLLM.
instance_group [
  {
    count: 1
    kind: KIND_MODEL
  }
]
"""
REPOSITORY = Path("engines/triton/model_repository")  # in a run's folder
EXIT_TIMEOUT_S = 40  # what models have to end in when the server is told to
NO_COUNTERS = "Triton's metrics have no speculative counters"


def model_files(engine_args: Mapping[str, Any]) -> dict[str, str]:
    """A model's files as the vLLM backend reads them, by their path below the model's folder.

    *engine_args* are fields of vLLM's AsyncEngineArgs, `model` among them.
    """
    arguments = json.dumps(dict(engine_args), indent=4, ensure_ascii=False)
    return {"config.pbtxt": CONFIG_PBTXT, "1/model.json": arguments + "\n"}


def write_model(repository: Path, name: str, engine_args: Mapping[str, Any]) -> Path:
    """Write the model's files into *repository*; the model's folder."""
    folder = repository / name
    (folder / "1").mkdir(parents=True, exist_ok=True)
    for path, text in model_files(engine_args).items():
        (folder / path).write_text(text, encoding="utf-8")
    return folder


def server_argv(
    command: Sequence[str],
    repository: Path,
    *,
    http: int | str,
    grpc: int | str,
    metrics: int | str,
    exit_timeout_s: int = EXIT_TIMEOUT_S,
) -> tuple[str, ...]:
    """The command line of a tritonserver whose models are loaded one by one.

    *http*, *grpc* and *metrics* are its ports, here only.
    """
    options = {
        "http-address": "127.0.0.1",
        "http-port": http,
        "grpc-address": "127.0.0.1",
        "grpc-port": grpc,
        "metrics-port": metrics,
        "metrics-address": "127.0.0.1",
        "exit-timeout-secs": exit_timeout_s,
        "model-control-mode": "explicit",
        "model-repository": repository.absolute(),
    }
    return (*command, *(f"--{name}={value}" for name, value in options.items()))


@dataclass
class TritonModel:
    """A model that is loaded; what `run` takes for a server. `inputs` are the names it takes."""

    url: str
    served_model: str
    api_key: str | None = field(default=None, repr=False)
    grpc_url: str | None = None
    inputs: frozenset[str] = frozenset()

    def counters(self) -> EngineCounters:
        """Triton has none.

        Raises:
            counters.CountersUnreadable: always.
        """
        raise counters.CountersUnreadable(NO_COUNTERS)

    def counters_after(self, before: EngineCounters, finished: int) -> EngineCounters:
        """See `counters`."""
        raise counters.CountersUnreadable(NO_COUNTERS)

    def is_dead(self) -> bool:
        """Triton starts a model's stub again when it died, or says so in each answer."""
        return False

    def close(self) -> None:
        """Nothing to give up."""


class TritonServer:
    """A running tritonserver, as a context manager; with a *url*, one that somebody else runs.

    *command* starts it; *repository* is its model repository, *env* what its models need.
    """

    def __init__(
        self,
        *,
        command: Sequence[str] = (),
        repository: Path | None = None,
        folder: Path | None = None,
        env: Mapping[str, str] | None = None,
        url: str | None = None,
        grpc_url: str | None = None,
        timeout_s: float = 1800,
        exit_timeout_s: int = EXIT_TIMEOUT_S,
        waiting: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._command, self._repository, self._folder = list(command), repository, folder
        self._env, self._timeout_s, self._waiting = dict(env or {}), timeout_s, waiting
        self._exit_timeout_s = exit_timeout_s
        self.url = url.rstrip("/") if url else ""
        self.grpc_url = grpc_url
        self.argv: tuple[str, ...] | None = None
        self.child: Child | None = None
        self.version: str | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Start it where it is ours, and wait until it answers.

        Raises:
            EngineError: it does not start, or nothing answers at the url.
        """
        try:
            if not self.url:
                self._start()
            self._http = self._stack.enter_context(
                httpx.Client(
                    base_url=self.url,
                    timeout=30,
                    trust_env=False,
                    transport=Bounded(verify=self.url.startswith("https"), trust_env=False),
                )
            )
            self._until_ready()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        assert self._repository is not None
        assert self._folder is not None
        http, grpc, metrics = free_port(), free_port(), free_port()
        self.url, self.grpc_url = f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}"
        self.argv = server_argv(
            self._command,
            self._repository,
            http=http,
            grpc=grpc,
            metrics=metrics,
            exit_timeout_s=self._exit_timeout_s,
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        log = self._folder / "tritonserver.log"
        child = Child(
            self.argv, log=log, cwd=self._folder, env=self._env, patience_s=self._exit_timeout_s + 5
        )
        self.child = self._stack.enter_context(child)

    def _until_ready(self) -> None:
        began = time.monotonic()
        while True:
            self._must_live()
            try:
                if self._http.get("/v2/health/ready").status_code == 200:
                    self.version = str(self._http.get("/v2").json().get("version"))
                    return
            except (httpx.HTTPError, ValueError):
                pass
            if self.child is None or time.monotonic() - began > min(self._timeout_s, 120):
                raise self._failed(
                    f"Triton did not answer at {self.url}.",
                    "unreachable" if self.child is None else "not_ready_in_time",
                    hint="A stub whose libpython is not found hangs like this: see docs/triton.md.",
                )
            self._waiting(f"starting Triton ({time.monotonic() - began:.0f} s)")
            time.sleep(0.1)

    @property
    def has_died(self) -> bool:
        """Whether it was ours and is gone."""
        return self.child is not None and self.child.poll() is not None

    def _must_live(self) -> None:
        if self.child is not None and (code := self.child.poll()) is not None:
            early = self.version is None
            raise self._failed(
                f"tritonserver ended with status {code}.",
                "exited_before_ready" if early else "died",
            )

    def _failed(
        self, message: str, failure: Failure = "not_loaded", *, hint: str | None = None
    ) -> EngineError:
        if self.child is not None:
            return self.child.failed(message, failure, hint=hint)
        return EngineError(message, failure=failure, hint=hint)

    def load(self, name: str, *, arm: str, start: int) -> tuple[TritonModel, EngineFacts]:
        """Load the model and have it answer a request.

        Raises:
            EngineError: it does not load, or does not answer, with the reason that Triton gives.
        """
        began, at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
        self._load(name)
        self._must_answer(name)
        facts = EngineFacts(
            arm=arm,
            start=start,
            kind="triton",
            version=self.version,
            url=self.url,
            served_model=name,
            argv=self.argv,
            env={k: v for k, v in self._env.items() if not SECRET.search(k)},
            pid=self.child.pid if self.child else None,
            startup_s=round(time.monotonic() - began, 3),
            log=self.child.log.name if self.child else None,
            machine=machine.hardware() if self.child else {},
            host=socket.gethostname() if self.child else None,
            started_at=at,
            notes=(f"Triton {self.version}; what its vLLM backend runs is in the log only",),
        )
        model = TritonModel(self.url, name, grpc_url=self.grpc_url, inputs=self._inputs(name))
        return model, facts

    def _load(self, name: str) -> None:
        self._waiting(f"Triton loads {name}")
        if self.child is not None:
            self.child.forget_log()  # of the models before
        try:
            answer = self._http.post(
                f"/v2/repository/models/{name}/load", json={}, timeout=self._timeout_s
            )
        except httpx.HTTPError as error:
            self._must_live()
            raise self._failed(f"Triton did not load {name}: {type(error).__name__}.") from None
        if answer.status_code != 200:
            raise self._failed(f"Triton does not load {name}: {_error(answer)}.")

    def echo(self, name: str, into: str, out_of: str, text: str) -> str:
        """Load a model that takes one text and gives one; what it makes of *text*.

        Raises:
            EngineError: it does not load or answer.
        """
        self._load(name)
        tensor = {"name": into, "shape": [1], "datatype": "BYTES", "data": [text]}
        try:
            answer = self._http.post(f"/v2/models/{name}/infer", json={"inputs": [tensor]})
            outputs = {one["name"]: one["data"] for one in answer.json().get("outputs", ())}
        except (httpx.HTTPError, ValueError) as error:
            raise self._failed(f"{name} is loaded but did not answer: {error}.") from None
        if out_of not in outputs:
            raise self._failed(f"{name} is loaded but does not answer: {_error(answer)}.")
        return str(outputs[out_of][0])

    def _inputs(self, name: str) -> frozenset[str]:
        """The inputs that the loaded model takes: older backends know fewer."""
        try:
            config = self._http.get(f"/v2/models/{name}/config").json()
            return frozenset(str(one["name"]) for one in config["input"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise self._failed(f"Triton does not say what {name} takes: {error}.") from None

    def _must_answer(self, name: str) -> None:
        """READY is not enough: the first tensor may be what fails."""
        sampling = json.dumps({"max_tokens": 1, "temperature": 0})
        body = {"text_input": "1 2 3", "stream": False, "sampling_parameters": sampling}
        try:
            answer = self._http.post(f"/v2/models/{name}/generate", json=body, timeout=120)
            said = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise self._failed(f"{name} is loaded but does not answer: {error}.") from None
        if answer.status_code != 200 or "error" in said or "text_output" not in said:
            raise self._failed(
                f"{name} is loaded but does not answer: {_error(answer)}.",
                hint="docs/triton.md has the usual reasons (numpy 2 in the stub's Python).",
            )

    def unload(self, name: str) -> None:
        """Unload the model and wait until it is gone.

        Raises:
            EngineError: it is still there after a minute, or the server is gone.
        """
        until = time.monotonic() + 60
        try:
            self._http.post(f"/v2/repository/models/{name}/unload", json={})
            while time.monotonic() < until:
                self._must_live()
                if self.state(name) in (None, "UNAVAILABLE"):
                    return
                self._waiting(f"Triton unloads {name}")
                time.sleep(0.1)
        except (httpx.HTTPError, ValueError) as error:
            self._must_live()
            raise self._failed(f"Triton did not unload {name}: {type(error).__name__}.") from None
        raise self._failed(f"Triton still has {name} a minute after it was told to unload it.")

    def state(self, name: str) -> str | None:
        """READY, LOADING, UNLOADING, UNAVAILABLE; None where the repository has no such model."""
        index: list[dict[str, Any]] = self._http.post("/v2/repository/index", json={}).json()
        states = [str(one["state"]) for one in index if one["name"] == name and "state" in one]
        return states[0] if states else None


def _error(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]).rstrip(".")[:500]
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code} {answer.text[:200]}".strip()
