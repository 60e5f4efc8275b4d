"""What every load generator offers, so that `run` need not know which one it has."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from specbench.records import Prompt, RequestRecord, ToolReport

OnRecord = Callable[[RequestRecord], None]


class LoadGenerator(Protocol):
    """Sends prompts to the one server it was made for.

    `unit` is the least it can send at a time: "conversation" (any subset of the prompts, so that
    arms can take turns prompt by prompt) or "set" (a whole prompt set in one go, as a tool that
    is a process of its own does).
    """

    unit: str

    def send(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int,
        concurrency: int,
        on_record: OnRecord,
        rate: float | None = None,
        folder: Path | None = None,
    ) -> Sequence[ToolReport] | None:
        """Send all turns of *prompts*; `on_record` gets each request as it ends.

        A conversation's turns go in order; at most *concurrency* conversations are in flight. With
        a *rate* conversations start at random instead (Poisson arrivals, that many a second on
        average), however many are in flight then. A tool that is a process of its own leaves its
        files in *folder*, and returns what it says itself, run by run. One request's failure is a record with an `error` and ends its conversation only.

        Raises:
            LoadError: the generator itself failed.
        """

    def close(self) -> None:
        """Give up connections and processes."""


WARM_UP_PROMPTS: tuple[str, ...] = (
    "Name three rivers and the countries that they flow through.",
    "def moving_average(values, window):\n    # returns a list of means\n",
    "Explain to a neighbour why bread rises, in four short sentences.",
    "Translate into French: the train leaves at seven from platform two.",
    "What is 17 times 23? Show each step.",
    "Write the first lines of a letter to a landlord about a broken heater.",
    "SELECT name, COUNT(*) FROM visits GROUP BY name -- explain this query",
    "List the planets in order of size, smallest first.",
)


def warm_up_prompts(count: int) -> list[Prompt]:
    """*count* prompts of our own, unlike each other, so that warm-up meets varied shapes."""
    texts = [WARM_UP_PROMPTS[i % len(WARM_UP_PROMPTS)] for i in range(count)]
    return [Prompt(id=f"warm-up-{i}", turns=(text,)) for i, text in enumerate(texts)]
