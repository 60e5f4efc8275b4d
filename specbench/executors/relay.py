"""The two ends of a unit's facts: a store that tells them, and a keeper that stores what is told."""

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from specbench.arms import Progress, fail_case
from specbench.errors import EngineError
from specbench.executors.told import Hello, Piece, Start, Told, Verdict
from specbench.failures import Failure, Trouble
from specbench.prepare import Prepared
from specbench.records import CounterSpan, EngineFacts, RequestRecord, ToolReport
from specbench.store import RunStore, write_bytes
from specbench.sweep import Case

LARGEST_FILE = 4 << 20  # bytes; of a larger one its end is kept

Tell = Callable[[Told], None]


class RelayStore(RunStore):
    """A folder for as long as a unit takes, whose every fact is also told to the run.

    *starts* are the numbers that were handed out for each arm's starts.
    """

    def __init__(
        self, path: Path, document: dict[str, Any], tell: Tell, starts: Mapping[str, Iterable[int]]
    ) -> None:
        super().__init__(path, document)
        self._tell, self._starts = tell, {arm: iter(those) for arm, those in starts.items()}

    def next_start(self, arm: str) -> int:
        """The next of the numbers that were handed out."""
        number = next(self._starts[arm])
        self._tell(Told(start=Start(arm=arm, number=number)))
        return number

    def save_engine(self, facts: EngineFacts) -> None:
        """Keep and tell."""
        super().save_engine(facts)
        self._tell(Told(engine=facts))

    def append_request(self, case_id: str, record: RequestRecord) -> None:
        """Keep and tell."""
        super().append_request(case_id, record)
        self._tell(Told(case=case_id, request=record))

    def append_counters(self, case_id: str, span: CounterSpan) -> None:
        """Keep and tell."""
        super().append_counters(case_id, span)
        self._tell(Told(case=case_id, counters=span))

    def append_tool(self, case_id: str, report: ToolReport) -> None:
        """Keep and tell, with the tool's files."""
        super().append_tool(case_id, report)
        self._tell(Told(case=case_id, tool=report))
        folder = self.case_folder(case_id) / report.folder
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink():
                self.tell_file(path)

    def finish_case(
        self,
        case_id: str,
        status: str,
        problem: str | None = None,
        failure: Failure | None = None,
    ) -> None:
        """Keep and tell."""
        super().finish_case(case_id, status, problem, failure)
        verdict = Verdict.model_validate({"status": status, "problem": problem, "failure": failure})
        self._tell(Told(case=case_id, verdict=verdict))

    def reopen_case(self, case_id: str) -> None:
        """Keep and tell."""
        super().reopen_case(case_id)
        self._tell(Told(reopened=case_id))

    def tell_file(self, path: Path) -> None:
        """Send a file of this folder, which is no fact."""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LARGEST_FILE))
            data = base64.b64encode(file.read()).decode()
        self._tell(Told(piece=Piece(path=path.relative_to(self.path).as_posix(), data=data)))

    def tell_logs(self) -> None:
        """Send what the engines printed. To be called when they are down: secrets are covered then."""
        for path in sorted(self.path.glob("engines/*/engine.log")):
            self.tell_file(path)


class Keeper:
    """Stores what a unit tells, line by line. Nothing that is not of the unit's cases is taken."""

    def __init__(
        self, prepared: Prepared, store: RunStore, cases: Iterable[Case], progress: Progress
    ) -> None:
        self._prepared, self._store, self._progress = prepared, store, progress
        self._cases = {case.id: case for case in cases}
        self._arms = {case.arm for case in self._cases.values()}
        self.hello: Hello | None = None
        self.refused: str | None = None
        self.status: int | None = None
        self.log = ""

    @property
    def host(self) -> str:
        """The host that measures it, as far as it is known."""
        return self.hello.host if self.hello else "a host"

    def take(self, lines: str) -> None:
        """Store what whole *lines* tell.

        Raises:
            EngineError: they are none that a specbench of this version tells.
            FailedFast: a case failed, and the run is to end with the first.
            StoreError: the run's folder cannot be written.
        """
        for line in lines.splitlines():
            try:
                told = Told.model_validate_json(line)
            except ValidationError as error:
                raise EngineError(
                    f"{self.host} tells what no specbench of this version does: "
                    f"{error.errors(include_url=False)[0]['msg']}."
                ) from None
            self._take(told)

    def _take(self, told: Told) -> None:
        if told.hello is not None:
            self.hello = told.hello
        if told.say is not None:
            self._progress.say(f"{self.host}: {self._in_the_run(told.say)}")
        if told.waiting is not None:
            self._progress.waiting(f"{self.host}: {told.waiting}")
        if told.refused is not None:
            self.refused = told.refused
        if told.end is not None:
            self.status, self.log = told.end.status, told.end.log
        if told.case is not None:
            self._take_of_case(self._cases[self._known(told.case, self._cases)], told)
        self._take_of_unit(told)

    def _take_of_unit(self, told: Told) -> None:
        store = self._store
        if told.start is not None:
            folder = store.engine_folder(self._known(told.start.arm, self._arms), told.start.number)
            folder.mkdir(parents=True, exist_ok=True)
        if told.engine is not None:
            self._known(told.engine.arm, self._arms)
            store.save_engine(told.engine)
        if told.reopened is not None:
            store.reopen_case(self._known(told.reopened, self._cases))
        if told.piece is not None:
            self._keep_piece(told.piece)

    def _take_of_case(self, case: Case, told: Told) -> None:
        if told.request is not None:
            self._store.append_request(case.id, told.request)
            self._progress.advance(case, told.request)
        if told.counters is not None:
            self._store.append_counters(case.id, told.counters)
        if told.tool is not None:
            self._store.append_tool(case.id, told.tool)
        if (verdict := told.verdict) is not None and verdict.status == "ok":
            self._store.finish_case(case.id, "ok")
        elif verdict is not None:
            problem = self._in_the_run(verdict.problem or "")
            trouble = Trouble(verdict.failure or "not_measured", problem)
            fail_case(self._prepared, self._store, case, verdict.status, trouble)

    def _keep_piece(self, piece: Piece) -> None:
        """An engine's log, or a tool's file in a folder of a case: never a fact's own file."""
        match PurePosixPath(piece.path).parts:
            case ("engines", str(start), "engine.log"):
                self._known(start.rpartition(".")[0], self._arms)
            case ("cases", str(case_id), str(), _, *_):
                self._known(case_id, self._cases)
            case _:
                raise self._unknown(piece.path)
        if ".." in PurePosixPath(piece.path).parts:
            raise self._unknown(piece.path)
        path = self._store.path / piece.path
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_bytes(path, base64.b64decode(piece.data, validate=True))
        except binascii.Error:
            raise self._unknown(piece.path) from None

    def _known(self, name: str, known: Iterable[str]) -> str:
        if name not in known:
            raise self._unknown(name)
        return name

    def _unknown(self, name: str) -> EngineError:
        return EngineError(f"{self.host} tells of {name[:200]!r}, which is not what it measures.")

    def _in_the_run(self, text: str) -> str:
        """*text* with paths of the run's folder in place of those that are gone with the unit."""
        return text.replace(self.hello.folder, str(self._store.path)) if self.hello else text
