"""How far a run is, on standard error: a live line on a terminal, plain lines elsewhere."""

import time
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specbench.records import RequestRecord
from specbench.render.columns import printable
from specbench.sweep import Case

PLAIN_EVERY_S = 10.0


class Lasting:
    """A text stream that swallows what cannot be written: a run outlives the terminal it is shown on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As the stream's; the whole length also where nobody reads it."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """As the stream's."""
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (whatever the stream has)
        return getattr(self._stream, name)


class RunProgress:
    """Tells a person what a run is doing. A context manager around the run."""

    def __init__(self, requests: int, done: int, console: Console) -> None:
        self._console, self._total, self._done = console, requests, done
        self._live = console.is_terminal
        self._said_ns = 0
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not self._live,
        )
        self._task = self._bar.add_task("starting", total=requests, completed=done)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """A line that stays. What a server or a prompt file said in it cannot move the cursor."""
        lines = map(printable, text.split("\n"))
        self._console.print("\n".join(lines), markup=False, highlight=False)

    def waiting(self, text: str) -> None:
        """What is happening now."""
        self._bar.update(self._task, description=printable(text))
        self._plain(text)

    def advance(self, case: Case, record: RequestRecord) -> None:
        """One request of *case* ended."""
        self._done += 1
        if record.cycle:  # a further pass, which nobody could plan
            self._total += 1
            self._bar.update(self._task, total=self._total)
        what = f"{case.arm} {case.prompt_set} {record.prompt_id}"
        self._bar.update(self._task, advance=1, description=printable(what)[:48])
        self._plain(f"{self._done} of {self._total} requests ({what})")
        if record.error:
            self.say(f"{case.id}, prompt {record.prompt_id}: {record.error}")

    def _plain(self, text: str) -> None:
        if not self._live and time.monotonic_ns() - self._said_ns > PLAIN_EVERY_S * 1e9:
            self._said_ns = time.monotonic_ns()
            self.say(text)
