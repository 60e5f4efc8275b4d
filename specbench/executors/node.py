"""The process on a host that measures one unit, as `specbench run` measures a run.

    python -m specbench.executors.node FOLDER

FOLDER holds order.json and share.json (told.py); both are deleted once they are read, because the
config's secrets are in there. What happens is appended to FOLDER/told, a line each. It is a process
of its own so that nothing of the cluster's computes beside the client that takes the times.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from specbench import __version__
from specbench.arms import Engines
from specbench.config import Config
from specbench.errors import EngineError, SpecbenchError
from specbench.executors.relay import RelayStore, Tell
from specbench.executors.told import Order, Share, Told
from specbench.prepare import Earlier, Prepared, prepare
from specbench.prompts.sets import PromptSet
from specbench.records import RequestRecord
from specbench.run import run_stages
from specbench.store import RunStore
from specbench.sweep import Case

ORDER, SHARE, TOLD = "order.json", "share.json", "told"
WAITING_S = 1.0


class Teller:
    """A `Progress` that tells the run, as does a call of it; adds whole lines to a file."""

    def __init__(self, path: Path) -> None:
        self._out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._waited = -WAITING_S

    def __call__(self, told: Told) -> None:
        """Tell one thing."""
        line = told.line.encode()
        while line:  # a full disk may take a part; then it raises
            line = line[os.write(self._out, line) :]

    def say(self, text: str) -> None:
        """Something worth keeping on the screen."""
        self(Told(say=text))

    def waiting(self, text: str) -> None:
        """What is going on now; seldom enough for a network."""
        if (now := time.monotonic()) - self._waited >= WAITING_S:
            self._waited = now
            self(Told(waiting=text))

    def advance(self, case: Case, record: RequestRecord) -> None:
        """The request itself says so."""


def measure(order: Order, share: Share, folder: Path, teller: Teller) -> None:
    """Bring up the unit's engines, send what is not measured yet, tell everything.

    Raises:
        SpecbenchError: nothing can be measured here, with the reason.
    """
    prepared = _prepared(order, share, teller)
    store = _seeded(folder, share, teller)
    with store:
        try:
            with Engines(prepared, store, teller) as engines:
                run_stages(engines, store, teller)
        finally:
            store.tell_logs()


def _prepared(order: Order, share: Share, teller: Teller) -> Prepared:
    """The run's config looked up on this host, with the unit's part of the plan."""
    config = Config.model_validate(order.config)
    sets = {
        name: PromptSet(
            name, sent.prompts, sent.sha256, sent.source, Path(f"{name}.jsonl"), sent.available
        )
        for name, sent in order.prompt_sets.items()
    }
    whole = prepare(
        config,
        config_path="the run's config",
        prompt_folders=(),
        say=teller.say,
        earlier=Earlier(sets, order.together, order.chosen_k),
    )
    stages = tuple(whole.plan.stages[place] for place in share.stages)
    prepared = replace(whole, plan=replace(whole.plan, stages=stages))
    if tuple(case.id for case in prepared.plan.cases) != share.cases:
        raise EngineError("Its plan is not the run's: another specbench is installed there.")
    return prepared


def _seeded(folder: Path, share: Share, tell: Tell) -> RelayStore:
    """A run folder that holds what the run holds of the unit's cases."""
    made = RunStore.create(folder, "unit", {})
    for case_id, records in share.measured.items():
        at = made.case_folder(case_id)
        lines = "".join(record.model_dump_json(exclude_none=True) + "\n" for record in records)
        (at / "requests.jsonl").write_text(lines, encoding="utf-8")
    for case_id, verdict in share.verdicts.items():
        made.finish_case(case_id, verdict.status, verdict.problem, verdict.failure)
    starts: Mapping[str, tuple[int, ...]] = share.starts
    return RelayStore(made.path, made.document, tell, starts)


def _check_version(of_the_run: str) -> None:
    """Before anything of another version is read."""
    if of_the_run != __version__:
        raise EngineError(
            f"It has specbench {__version__}, and the run is of {of_the_run}.",
            hint="Install the same one on all hosts.",
        )


def main() -> NoReturn:
    """The command line above; 0 when the unit was gone through, whatever its cases came to."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(sys.argv[1])
    teller = Teller(folder / TOLD)
    try:
        order, share = ((folder / name).read_bytes() for name in (ORDER, SHARE))
        for name in (ORDER, SHARE):
            (folder / name).unlink()
        _check_version(json.loads(order)["version"])
        measure(Order.model_validate_json(order), Share.model_validate_json(share), folder, teller)
    except SpecbenchError as error:
        teller(Told(refused=str(error)))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    sys.exit(0)


if __name__ == "__main__":
    main()
