"""Every error a user can see, with its exit code and what to do next.

SpecbenchError
├── UserError          exit 2: the command line, a config, a prompt file, a run folder
│   ├── ConfigError    a YAML file; names the file and the key
│   ├── PromptError    a prompt file; names the file and the physical line
│   ├── ExchangeError  another tool's results, or a run that its files can't hold
│   └── StoreError     a run folder that is missing, taken, torn or of another format
└── ToolError          exit 3: something that specbench started failed
    ├── EngineError    an engine that did not start, died or answered nonsense
    ├── FailedFast     the first case that failed, where the user wants to hear no more
    └── LoadError      a load generator that failed as a whole (one request's error is a record)
"""

from pathlib import Path

from specbench.failures import Failure


class SpecbenchError(Exception):
    """One line that says what is wrong, where, and what to do; `exit_code` for the shell."""

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message


LONGEST = 1000  # characters; a field of 2 MB is quoted in part


class UserError(SpecbenchError):
    """The user's to mend. What it quotes of a file cannot break its line, nor write to a terminal."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(_in_a_line(message), hint=hint and _in_a_line(hint))


def _in_a_line(text: str) -> str:
    """*text* in printable characters of one line, the middle of a long one left out."""
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} … {text[-LONGEST // 3 :]}"
    return text if text.isprintable() else without_controls(" ".join(text.split()))


def without_controls(text: str) -> str:
    """*text* without what moves a terminal's cursor or colours it, but for the ends of lines."""
    if text.isprintable():
        return text
    keep = ("\n", "\t")
    return "".join(c if c.isprintable() or c in keep else "\N{REPLACEMENT CHARACTER}" for c in text)


class ConfigError(UserError):
    """A config that cannot be used; *path* and *key* say where."""

    def __init__(
        self, path: Path | str, key: str | None, problem: str, *, hint: str | None = None
    ) -> None:
        where = f"{path}: {key}" if key else str(path)
        super().__init__(f"{where}: {problem}", hint=hint)
        self.path, self.key = path, key


class PromptError(UserError):
    """A prompt file that cannot be used; *line* is the physical line (or *unit*), from 1."""

    def __init__(
        self,
        path: Path | str,
        line: int | None,
        problem: str,
        *,
        hint: str | None = None,
        unit: str = "line",
    ) -> None:
        where = f"{path}, {unit} {line}" if line is not None else str(path)
        super().__init__(f"{where}: {problem}", hint=hint)
        self.path, self.line = path, line


class ExchangeError(UserError):
    """A file of another tool that cannot be read or written; *line* is the physical line."""

    def __init__(
        self, path: Path | str, line: int | None, problem: str, *, hint: str | None = None
    ) -> None:
        where = f"{path}, line {line}" if line is not None else str(path)
        super().__init__(f"{where}: {problem}", hint=hint)
        self.path, self.line = path, line


class StoreError(UserError):
    """A run folder that cannot be read or written as asked."""


class ToolError(SpecbenchError):
    """A process that specbench started, or a server it was sent to, failed."""

    exit_code = 3


class EngineError(ToolError):
    """An engine failed; *log* holds the whole story, *tail* its last lines.

    *failure* is the failure's name, *advice* what to do about its cause where that is known.
    """

    def __init__(
        self,
        message: str,
        *,
        failure: Failure = "not_started",
        log: Path | None = None,
        tail: str = "",
        advice: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=f"{advice} {hint}" if advice and hint else advice or hint)
        self.failure, self.log, self.tail, self.advice = failure, log, tail, advice


class FailedFast(ToolError):
    """A case failed, and the run ends there (--fail-fast)."""


class LoadError(ToolError):
    """A load generator failed as a whole."""
