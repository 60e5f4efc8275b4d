"""A tape instead of a server: the requests of an earlier run, given back as if sent again.

The second load generator. It lets everything above `load` (order, store, resume, analysis) be
exercised in milliseconds on facts that a real engine produced.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from specbench.errors import LoadError
from specbench.load.base import OnRecord
from specbench.records import Prompt, RequestRecord


class ReplayClient:
    """Answers from *tape*; with `speed`, as slowly as it was recorded (1.0) or faster (10.0).

    A prompt that was recorded several times (in cycles, in repeats) gets its answers in turn.
    """

    unit = "conversation"

    def __init__(
        self,
        tape: Iterable[RequestRecord],
        *,
        start: int = 0,
        speed: float | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._tape: dict[tuple[str, int], deque[RequestRecord]] = {}
        for record in tape:
            self._tape.setdefault((record.prompt_id, record.turn), deque()).append(record)
        self._start, self._speed, self._sleep = start, speed, sleep

    def send(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int,
        concurrency: int,
        on_record: OnRecord,
        rate: float | None = None,
        folder: Path | None = None,
    ) -> None:
        """See LoadGenerator.send.

        Raises:
            LoadError: the tape does not hold one of the prompts.
        """
        for prompt in prompts:
            for turn in range(len(prompt.turns)):
                recorded = self._tape.get((prompt.id, turn))
                if recorded is None:
                    raise LoadError(f"The tape holds no answer to prompt {prompt.id}, turn {turn}.")
                record = recorded[0]
                recorded.rotate(-1)
                if self._speed:
                    self._sleep((record.end_ns - record.sent_ns) / 1e9 / self._speed)
                on_record(record.model_copy(update={"start": self._start, "cycle": 0}))
                if record.error is not None:
                    break

    def close(self) -> None:
        """Nothing to give up."""
