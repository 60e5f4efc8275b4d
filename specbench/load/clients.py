"""Which load generator a config means, made for one server."""

from collections.abc import Callable
from dataclasses import dataclass

from specbench.config import Load, Sampling
from specbench.load.aiperf import AIPerfClient
from specbench.load.base import LoadGenerator
from specbench.load.direct import DirectClient
from specbench.load.genai_perf import GenAIPerfClient
from specbench.load.tool_client import Target
from specbench.load.tools import Installed
from specbench.records import Prompt

TOOL_CLIENTS = {"genai-perf": GenAIPerfClient, "aiperf": AIPerfClient}


@dataclass(frozen=True)
class Clients:
    """Makes the load generators of a run; `tool` is there when the config names one.

    `keep_off` are the cores that the engine computes on.
    """

    sampling: Sampling
    load: Load
    tool: Installed | None = None
    keep_off: frozenset[int] = frozenset()

    def direct(
        self, target: Target, start: int, seed_of: Callable[[Prompt], int] | None = None
    ) -> DirectClient:
        """Our own client: also what warms an engine up before a tool measures it."""
        return DirectClient(
            dialect=target.dialect(),
            url=target.url,
            served_model=target.served_model,
            api_key=target.api_key,
            sampling=self.sampling,
            load=self.load,
            start=start,
            seed_of=seed_of,
        )

    def measuring(
        self,
        target: Target,
        start: int,
        seed_of: Callable[[Prompt], int] | None,
        waiting: Callable[[str], None],
    ) -> LoadGenerator:
        """What sends the prompts that count."""
        if self.tool is None:
            return self.direct(target, start, seed_of)
        assert seed_of is None, "a tool sends every prompt with the config's seed"
        kind = TOOL_CLIENTS[self.tool.tool.name]
        return kind(
            self.tool,
            target,
            sampling=self.sampling,
            load=self.load,
            start=start,
            keep_off=self.keep_off,
            waiting=waiting,
        )
