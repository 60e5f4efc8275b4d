"""The layout of results/: facts are appended, documents replaced, nothing measured is lost.

    results/RUN/run.json               config, plan, prompts' hashes, provenance; written first
                prompts/SET.jsonl      the prompts as they were sent
                engines/ARM.S/         engine.log and engine.json of start S of an arm
                cases/ID/requests.jsonl   a RequestRecord a line, synced one by one
                cases/ID/counters.jsonl   a CounterSpan a line
                cases/ID/tools.jsonl   a ToolReport a line, and the tool's own files beside it
                cases/ID/imported.json  an Imported: where a case that was not measured here is from
                cases/ID/done.json     written last: the case's status, and its failure's name
                telemetry.jsonl        a TelemetryLine a line, added by the sampler (telemetry/)
                done.json              written last of all: the run's status

A folder without done.json is unfinished and can be resumed. A torn last line of a .jsonl (power
lost in the middle of a write) is dropped on reading and cut off on resuming; a bad line anywhere
else is an error, because something other than specbench wrote there.
"""

import fcntl
import json
import os
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Self, TypeVar, overload

from pydantic import ValidationError

from specbench.errors import StoreError
from specbench.failures import FAILURES, Failure
from specbench.records import (
    CounterSpan,
    EngineFacts,
    Fact,
    Imported,
    Prompt,
    RequestRecord,
    TelemetryLine,
    ToolReport,
)
from specbench.run_document import is_sound

FORMAT = 1  # bump when a reader of old files would misread new ones
RUN_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,120}$")
UNBORN = {"lock", "prompts"}  # what is in a run's folder before its run.json
F = TypeVar("F", bound=Fact)


class RunStore:
    """One run's folder, open for reading or (as a context manager) locked for writing."""

    def __init__(self, path: Path, document: dict[str, Any]) -> None:
        self.path, self.document = path, document

    # --- opening ---

    @classmethod
    def create(
        cls,
        root: Path,
        run_id: str,
        document: dict[str, Any],
        prompts: Mapping[str, Sequence[Prompt]] | None = None,
    ) -> Self:
        """A new run folder with its *prompts* by set and, last of all, its run.json.

        So a folder with a run.json can be resumed, whenever its maker was killed; one without is
        nobody's, and is taken again.

        Raises:
            StoreError: the id is taken or can't be a folder's name, or *root* can't be written.
        """
        if not RUN_ID.fullmatch(run_id):
            raise StoreError(
                f"{run_id!r} can't be a run's id: letters, digits, '.', '_' and '-' only."
            )
        path = root / run_id
        try:
            path.mkdir(parents=True, exist_ok=True)
            names = {entry.name for entry in path.iterdir()}
            is_free = {name for name in names if not name.endswith(".draft")} <= UNBORN
        except FileExistsError:
            is_free = False
        except OSError as error:
            raise StoreError(f"{path} can't be made: {error.strerror}.") from None
        made = cls(path, {"format": FORMAT, "id": run_id, **document})
        if is_free:
            with made:  # against another who makes it just now
                if not (path / "run.json").exists():
                    for name, of_set in (prompts or {}).items():
                        made.save_prompts(name, of_set)
                    write_document(path / "run.json", made.document)
                    return made
        raise StoreError(
            f"{path} already holds a run;",
            hint="choose another --run-id, or go on with --resume.",
        )

    @classmethod
    def open(cls, path: Path) -> Self:
        """An existing run folder.

        Raises:
            StoreError: there is no run, or one that this version can't read.
        """
        try:
            document = _parsed((path / "run.json").read_bytes())
        except FileNotFoundError:
            raise StoreError(f"{path} holds no run (no run.json).") from None
        except (OSError, ValueError) as error:
            raise StoreError(f"{path / 'run.json'} can't be read: {error}.") from None
        found = document.get("format") if isinstance(document, dict) else None
        if type(found) is not int or found != FORMAT:  # True and 1.0 are 1 to Python
            raise StoreError(
                f"{path} has format {found!r}, this specbench reads {FORMAT}.",
                hint="Read it with the specbench that wrote it.",
            )
        return cls(path, document)

    def __enter__(self) -> Self:
        """Take the folder's lock.

        Raises:
            StoreError: another specbench has it.
        """
        try:
            self._lock = (self.path / "lock").open("w", encoding="utf-8")
        except OSError as error:
            raise StoreError(f"{self.path} can't be written: {error.strerror}.") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise StoreError(f"Another specbench is writing to {self.path}.") from None
        for draft in self.path.rglob(".*.draft"):  # of one that was killed as it wrote
            with suppress(OSError):
                draft.unlink()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    # --- writing ---

    def amend(self, changes: Mapping[str, Any]) -> None:
        """Put *changes* into run.json: what was planned on the way."""
        self.document |= changes
        write_document(self.path / "run.json", self.document)

    def save_prompts(self, name: str, prompts: Sequence[Prompt]) -> None:
        """Keep the prompts that are about to be sent."""
        folder = _made(self.path / "prompts")
        text = "".join(prompt.model_dump_json() + "\n" for prompt in prompts)
        write_text(folder / f"{name}.jsonl", text)

    def engine_folder(self, arm: str, start: int) -> Path:
        """Where a start of an engine keeps its log."""
        return self.path / "engines" / f"{arm}.{start}"

    def save_engine(self, facts: EngineFacts) -> None:
        """Keep the facts of an engine that is ready."""
        folder = _made(self.engine_folder(facts.arm, facts.start))
        write_text(folder / "engine.json", facts.model_dump_json(indent=1) + "\n")

    def append_request(self, case_id: str, record: RequestRecord) -> None:
        """Add one request; it is on disk when this returns."""
        _append(self._case(case_id) / "requests.jsonl", record)

    def append_counters(self, case_id: str, span: CounterSpan) -> None:
        """Add what the engine counted around some requests."""
        _append(self._case(case_id) / "counters.jsonl", span)

    def append_tool(self, case_id: str, report: ToolReport) -> None:
        """Add what a load generator of its own says of one run."""
        _append(self._case(case_id) / "tools.jsonl", report)

    def case_folder(self, case_id: str) -> Path:
        """Where a load generator may leave its files."""
        return self._case(case_id)

    def telemetry_file(self) -> Path:
        """Where the sampler may add its lines: it does so itself, and without syncing."""
        path = self.path / "telemetry.jsonl"
        _cut_torn_line(path)
        return path

    def finish_case(
        self,
        case_id: str,
        status: str,
        problem: str | None = None,
        failure: Failure | None = None,
    ) -> None:
        """Write the case's status: "ok", "failed" or "partial".

        *problem* is the reason in words: a sentence, then (on further lines) the end of a log;
        *failure* is its name.
        """
        document: dict[str, Any] = {"status": status, "problem": problem, "at": _now()}
        if failure is not None:
            document["failure"] = failure
        write_document(self._case(case_id) / "done.json", document)

    def reopen_case(self, case_id: str) -> None:
        """Make an unfinished or failed case ready to be added to."""
        folder = self._case(case_id)
        try:
            (folder / "done.json").unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{folder} can't be added to: {error.strerror}.") from None
        for name in ("requests.jsonl", "counters.jsonl", "tools.jsonl"):
            _cut_torn_line(folder / name)

    def finish(self, status: str) -> None:
        """Write the run's status, last of all."""
        write_document(self.path / "done.json", {"status": status, "at": _now()})

    def _case(self, case_id: str) -> Path:
        return _made(self.path / "cases" / case_id)

    # --- reading ---

    def requests(self, case_id: str) -> Iterator[RequestRecord]:
        """The case's requests, in the order they ended."""
        return _read(self._requests(case_id), RequestRecord)

    def request_lines(self, case_id: str) -> Iterator[tuple[int, RequestRecord]]:
        """The case's requests, each with where its line begins in the file."""
        return _read_lines(self._requests(case_id), RequestRecord)

    def request_at(self, case_id: str, offset: int) -> RequestRecord:
        """The request whose line begins at *offset*.

        Raises:
            StoreError: none does: the file is another one than it was.
        """
        return _read_at(self._requests(case_id), offset, RequestRecord)

    def _requests(self, case_id: str) -> Path:
        return self.path / "cases" / case_id / "requests.jsonl"

    def counters(self, case_id: str) -> list[CounterSpan]:
        """What the engine counted around the case's requests."""
        return list(_read(self.path / "cases" / case_id / "counters.jsonl", CounterSpan))

    def tools(self, case_id: str) -> list[ToolReport]:
        """What load generators of their own said around the case's requests."""
        return list(_read(self.path / "cases" / case_id / "tools.jsonl", ToolReport))

    def imported(self, case_id: str) -> Imported | None:
        """Where the case's numbers are from; None where specbench measured them."""
        document = _read_document(self.path / "cases" / case_id / "imported.json")
        try:
            return None if document is None else Imported.model_validate(document)
        except ValidationError as error:
            where = self.path / "cases" / case_id / "imported.json"
            raise StoreError(f"{where} can't be read: {_first_line(error)}.") from None

    def telemetry(self) -> Iterator[TelemetryLine]:
        """What the machine did meanwhile, in the order of time; nothing in runs without it."""
        return _read(self.path / "telemetry.jsonl", TelemetryLine)

    def case_status(self, case_id: str) -> dict[str, Any] | None:
        """The case's done.json; None while it is unfinished."""
        return _read_status(self.path / "cases" / case_id / "done.json")

    def status(self) -> dict[str, Any] | None:
        """The run's done.json; None while it is unfinished."""
        return _read_status(self.path / "done.json")

    def engines(self) -> list[EngineFacts]:
        """Every start of every engine, in order of arm and start."""
        found = []
        for path in sorted((self.path / "engines").glob("*/engine.json")):
            try:
                found.append(EngineFacts.model_validate_json(path.read_bytes()))
            except (OSError, ValidationError) as error:
                raise StoreError(f"{path} can't be read: {_first_line(error)}") from None
        return found

    def prompts(self, name: str) -> list[Prompt]:
        """The prompts of a set, as they were sent."""
        return list(_read(self.path / "prompts" / f"{name}.jsonl", Prompt))

    def prompt_lines(self, name: str) -> "Lines[Prompt]":
        """The prompts of a set, not all of them in memory."""
        return Lines(self.path / "prompts" / f"{name}.jsonl", Prompt)

    def counter_lines(self, case_id: str) -> "Lines[CounterSpan]":
        """What the engine counted around the case's requests, not all of it in memory."""
        return Lines(self.path / "cases" / case_id / "counters.jsonl", CounterSpan)

    def next_start(self, arm: str) -> int:
        """The number of this arm's next engine start, from 0."""
        there = (path.name.rpartition(".") for path in (self.path / "engines").glob(f"{arm}.*"))
        return max((int(n) + 1 for of, _, n in there if of == arm and n.isdecimal()), default=0)


class Lines(Sequence[F]):
    """The facts of a .jsonl file, which may be larger than memory: read again whenever looked at.

    All of them are read once when it is made, so that what is none is refused then (StoreError).
    """

    def __init__(self, path: Path, kind: type[F]) -> None:
        self._path, self._kind = path, kind
        self._offsets = array("q", (offset for offset, _ in _read_lines(path, kind)))

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, at: int) -> F: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[F]: ...
    def __getitem__(self, at: int | slice) -> F | Sequence[F]:
        if isinstance(at, slice):
            return [_read_at(self._path, offset, self._kind) for offset in self._offsets[at]]
        return _read_at(self._path, self._offsets[at], self._kind)

    def __iter__(self) -> Iterator[F]:
        return islice(_read(self._path, self._kind), len(self))


def latest(root: Path) -> Path:
    """The newest run in *root*.

    Raises:
        StoreError: there is none.
    """
    runs = [path.parent for path in root.glob("*/run.json")]
    if not runs:
        raise StoreError(f"There is no run in {root}/.", hint="Make one: `specbench run --config`.")
    return max(runs, key=lambda path: ((path / "run.json").stat().st_mtime_ns, path.name))


def new_run_id(name: str) -> str:
    """A fresh id: sorts by time, says what it was."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{name}"


# --- files ---------------------------------------------------------------------------------------


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Replace a JSON document: whole or not at all. NaN is refused."""
    write_text(path, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """See write_bytes."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write, sync, rename: a reader sees the old file or the new one.

    Raises:
        StoreError: the disk is full or read-only; nothing half-written stays.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        _sync_names(path.parent)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise StoreError(f"{path} can't be written: {error.strerror}.") from None


def _append(path: Path, fact: Fact) -> None:
    line = fact.model_dump_json(exclude_none=True).encode() + b"\n"
    size = 0
    try:
        with path.open("ab") as file:
            size = file.tell()
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        if not size:
            _sync_names(path.parent)
    except OSError as error:
        with suppress(OSError):  # what is half written must not become the middle of a line
            os.truncate(path, size)
        raise StoreError(f"{path} can't be added to: {error.strerror}.") from None


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{folder} can't be made: {error.strerror}.") from None
    return folder


def _sync_names(folder: Path) -> None:
    """Have the names in *folder* on disk: syncing a file keeps what is in it, not what it is called."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


BLOCK = 1 << 16


def _cut_torn_line(path: Path) -> None:
    """Drop what is behind the last whole line; looks at the end of the file only."""
    try:
        if not path.is_file():
            return
        with path.open("rb+") as file:
            size = at = file.seek(0, os.SEEK_END)
            whole = 0
            while at and not whole:
                at = max(0, at - BLOCK)
                file.seek(at)
                whole = at + block.rfind(b"\n") + 1 if b"\n" in (block := file.read(BLOCK)) else 0
            if whole < size:
                file.truncate(whole)
                os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(f"{path} can't be mended: {error.strerror}.") from None


def _read(path: Path, kind: type[F]) -> Iterator[F]:
    """The facts in a .jsonl, one line in memory at a time; a torn last line is dropped."""
    return (fact for _, fact in _read_lines(path, kind))


def _read_lines(path: Path, kind: type[F]) -> Iterator[tuple[int, F]]:
    """The facts in a .jsonl as `_read` gives them, each with where its line begins."""
    if not path.is_file():
        return
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                fact = kind.model_validate_json(line)
                problem = fact.impossible if isinstance(fact, RequestRecord) else None
            except ValidationError as error:
                problem = _first_line(error)
            if problem is not None:
                raise StoreError(
                    f"{path}, line {number}: not a {kind.__name__}: {problem}.",
                    hint="Something other than specbench wrote there; restore it or delete the case.",
                )
            yield offset, fact
            offset += len(line)


def _read_at(path: Path, offset: int, kind: type[F]) -> F:
    """The fact whose line begins at *offset*, as it was read there before."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return kind.model_validate_json(file.readline())
    except (OSError, ValidationError):
        raise StoreError(
            f"{path} was changed while it was read.", hint="Make the report again."
        ) from None


def _read_document(path: Path) -> dict[str, Any] | None:
    try:
        document = _parsed(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} can't be read: {error}.") from None
    return document if isinstance(document, dict) else None


def _read_status(path: Path) -> dict[str, Any] | None:
    """A done.json: `status`, `problem` and `at` are text, `failure` (not in old runs) is a name."""
    document = _read_document(path)
    if document is None:
        return None
    said = {"problem": None, "failure": None, "at": "", **document}
    problem = said["problem"]
    texts = (said.get("status"), said["at"], "" if problem is None else problem)
    if not all(isinstance(text, str) for text in texts) or said["failure"] not in (None, *FAILURES):
        raise StoreError(
            f"{path} can't be read: no `status` or `failure` that specbench writes.",
            hint="Delete it, and the run is unfinished; `specbench run --resume` ends it.",
        )
    return said


def _parsed(raw: bytes) -> Any:  # noqa: ANN401  (what JSON holds is any value)
    """The JSON in *raw*, which can be written again.

    Raises:
        ValueError: it is none, or nests too deep, or holds NaN, Infinity or half a character.
    """
    try:
        value = json.loads(raw)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not is_sound(value):
        raise ValueError("nested too deep")
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        problem = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
    return str(error).splitlines()[0]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
