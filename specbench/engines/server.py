"""An OpenAI-compatible vLLM that answers: its health, its models, its counters."""

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from specbench.config import Engine
from specbench.engines import counters
from specbench.engines.bounded import Bounded
from specbench.errors import EngineError
from specbench.records import EngineCounters

HEALTH_S = 2.0  # that a server may take to say how it is; others wait for their turn meanwhile
SETTLE_S = 3.0  # how long a finished request may take to show in /metrics


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
            # loading certificates costs 50 ms
            transport=Bounded(verify=self.url.startswith("https"), trust_env=False),
        )

    def close(self) -> None:
        """Give up the connection."""
        self._http.close()

    def _get(self, path: str) -> httpx.Response:
        return self._http.get(path)

    def healthy(self) -> bool:
        """Whether /health says yes."""
        try:
            return self._http.get("/health", timeout=HEALTH_S).status_code == 200
        except httpx.HTTPError:
            return False

    def is_dead(self) -> bool:
        """Whether it says itself that its engine is gone: vLLM's /health answers 503 then.

        Before 0.11 it was 500 (vllm-project/vllm pull request 24897).
        """
        try:
            return self._http.get("/health", timeout=HEALTH_S).status_code in (500, 503)
        except httpx.HTTPError:
            return False

    def models(self) -> list[str]:
        """The model names it serves; empty when it does not say."""
        try:
            answer = self._get("/v1/models")
            return [str(model["id"]) for model in answer.json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError, RecursionError):
            return []

    def version(self) -> str | None:
        """The engine's version as it says itself."""
        try:
            return str(self._get("/version").json()["version"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError, RecursionError):
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

    def kv_cache_tokens(self) -> int | None:
        """How many tokens its KV cache has room for; None when it does not say."""
        try:
            return counters.kv_cache_tokens(self._get("/metrics").text)
        except httpx.HTTPError:
            return None

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
    if not models or server.served_model not in ("", *models):
        server.close()
    if not models:
        raise EngineError(
            f"No OpenAI-compatible server answers at {url}/v1/models.",
            failure="unreachable",
            hint="Start it, or mend engine.url.",
        )
    if not server.served_model:
        server.served_model = models[0]
    if server.served_model not in models:
        raise EngineError(
            f"{url} serves {', '.join(models)}, not {server.served_model}.",
            failure="wrong_model",
            hint="Mend engine.served_model.",
        )
    return server
