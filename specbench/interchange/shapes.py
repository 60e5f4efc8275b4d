"""What the fields of other tools' files may hold: keys beyond those read here are left alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from specbench.errors import ExchangeError
from specbench.records import RequestRecord
from specbench.render.columns import printable

S = TypeVar("S", bound="Shape")
T = TypeVar("T")


def _no_switch(value: Any) -> Any:  # noqa: ANN401  (what JSON holds is any value)
    if isinstance(value, bool):
        raise ValueError("should be a number")  # noqa: TRY004  (pydantic takes ValueErrors)
    return value


def printable_utf8(text: str) -> str:
    """*text* as it can be stored: half of a surrogate pair becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


# The bounds are far beyond what is measured: they keep nonsense out of sums and times.
Count = Annotated[int, Field(strict=True, ge=0, le=10**9)]
Nanoseconds = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Number = Annotated[
    float, BeforeValidator(_no_switch), Field(strict=True, ge=0, le=1e12, allow_inf_nan=False)
]
Seconds = Annotated[
    float, BeforeValidator(_no_switch), Field(strict=True, ge=0, le=1e9, allow_inf_nan=False)
]
Text = Annotated[str, AfterValidator(printable_utf8)]


# What reading a file of another make-up raises.
BROKEN = (
    KeyError,
    TypeError,
    ValueError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
)
LATEST_NS, MOST_TOKENS = 2**63, 10**9


class Shape(BaseModel):
    """The part of a JSON object that is read."""

    model_config = ConfigDict(extra="ignore", frozen=True)


def shaped(kind: type[S], value: Any, path: Path, line: int, tool: str) -> S:  # noqa: ANN401
    """*value* as a *kind*.

    Raises:
        ExchangeError: names the line and the key.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = printable(".".join(map(str, problem["loc"])))
        raise ExchangeError(
            path, line, f"not as {tool} writes it: `{key}`: {problem['msg']}"
        ) from None
    except RecursionError:
        raise ExchangeError(path, line, "nested too deep") from None


def attempted(make: Callable[[], T], path: Path, line: int | None, tool: str) -> T:
    """What *make* gives; what a file of another make-up would raise becomes an ExchangeError."""
    try:
        return make()
    except BROKEN as error:
        problem = f"not as {tool} writes it ({type(error).__name__}: {str(error)[:200]})"
        raise ExchangeError(path, line, printable(" ".join(problem.split()))) from None


def possible(record: RequestRecord) -> RequestRecord:
    """*record*, if it can have been.

    Raises:
        ValueError: its times run backwards, or a count is out of all bounds.
    """
    times = (record.sent_ns, *record.chunk_ns, record.end_ns)
    if not 0 <= times[0] <= times[-1] < LATEST_NS or list(times) != sorted(times):
        raise ValueError("times that run backwards")
    counts = (record.output_tokens, record.prompt_tokens, record.cached_tokens)
    if not all(count is None or 0 <= count < MOST_TOKENS for count in counts):
        raise ValueError("a count of tokens that cannot be")
    return record
