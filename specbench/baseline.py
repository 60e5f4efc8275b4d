"""A pinned baseline: the snapshot of a run as a JSON file that stands in a repository.

Made for `git diff`: one line a row with rounded figures, then one line a measure of a row with the logs
that pair its prompts later (in the order of `prompts`, four decimals: 0.01%; null: not measured).
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from specbench import store as stores
from specbench.analysis.series import WHOLE_CASE, Series
from specbench.analysis.snapshot import Snapshot, SnapshotRow
from specbench.analysis.taking import snapshot
from specbench.errors import StoreError
from specbench.render.read import measured_cases
from specbench.store import RunStore

FORMAT = 1  # bump when a reader of old files would misread new ones
DIGITS = 4  # significant, of a figure
DECIMALS = 4  # of a log: 0.01%


def of_run(store: RunStore) -> Snapshot:
    """The snapshot of a run folder."""
    return snapshot(store.document, measured_cases(store))


def read(path: Path) -> Snapshot:
    """The snapshot of a run folder, or of a pinned baseline's file.

    Raises:
        StoreError: there is neither, or it cannot be read.
    """
    if path.suffix == ".json" and not path.exists():
        raise StoreError(
            f"{path} is not there;", hint=f"pin a run: specbench baseline save RUN -o {path}."
        )
    return load(path) if path.is_file() else of_run(RunStore.open(path))


# --- writing -------------------------------------------------------------------------------------


def save(kept: Snapshot, path: Path, *, replace: bool = False) -> None:
    """Write *kept* as a pinned baseline.

    Raises:
        StoreError: there is one and *replace* was not asked for, or it cannot be written.
    """
    if path.exists() and not replace:
        raise StoreError(f"{path} is there already;", hint="--replace puts this run in its place.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{path.parent} can't be made: {error.strerror}.") from None
    stores.write_text(path, as_text(kept))


def as_text(kept: Snapshot) -> str:
    """The file's text: keys in a fixed order, the same for the same run."""
    about = kept.model_dump(mode="json", exclude={"rows", "prompt_sets", "setups"})
    prompts = _prompt_order(kept.rows)
    parts = [f'"format": {FORMAT}', *(f"{_json(name)}: {_json(about[name])}" for name in about)]
    parts += [
        _block("prompt_sets", {n: _json(_said(one)) for n, one in kept.prompt_sets.items()}),
        _list("setups", (_json(_said(one)) for one in kept.setups)),
        _list("rows", (_json(_row_record(row)) for row in kept.rows)),
        _block("prompts", {name: _json(ids) for name, ids in prompts.items()}),
        _list(
            "series",
            (
                _json(_series_record(number, name, one, prompts[row.prompt_set]))
                for number, row in enumerate(kept.rows)
                for name, one in row.series.items()
            ),
        ),
    ]
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def _said(fact: Any) -> dict[str, Any]:  # noqa: ANN401  (a Fact; its values are any)
    said: dict[str, Any] = fact.model_dump(mode="json", exclude_none=True)
    return said


def _json(value: Any) -> str:  # noqa: ANN401
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _list(name: str, lines: Iterable[str]) -> str:
    return f'"{name}": [\n  ' + ",\n  ".join(lines) + "\n ]"


def _block(name: str, lines: Mapping[str, str]) -> str:
    inner = ",\n  ".join(f"{_json(key)}: {line}" for key, line in lines.items())
    return f'"{name}": {{\n  {inner}\n }}'


def _row_record(row: SnapshotRow) -> dict[str, Any]:
    record = row.model_dump(mode="json", exclude={"series"}, exclude_defaults=True)
    record["figures"] = {name: _rounded(value) for name, value in row.figures.items()}
    if row.speedup_interval:
        record["speedup_interval"] = [_rounded(end) for end in row.speedup_interval]
    return record


def _rounded(value: float) -> float:
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, DIGITS - 1 - math.floor(math.log10(abs(value))))


def _prompt_order(rows: Iterable[SnapshotRow]) -> dict[str, list[str]]:
    """Each set's prompts, in the order in which every series of it has its logs."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        order = found.setdefault(row.prompt_set, {})
        for one in row.series.values():
            order |= dict.fromkeys(one.by_prompt)
    return {
        name: [prompt for prompt in order if prompt != WHOLE_CASE] for name, order in found.items()
    }


def _series_record(row: int, measure: str, one: Series, prompts: list[str]) -> dict[str, Any]:
    record: dict[str, Any] = {
        "row": row,
        "measure": measure,
        "starts": [round(start, DECIMALS + 1) for start in one.starts],
    }
    if one.noise is not None:
        record["noise"] = round(one.noise, DECIMALS + 2)
    if WHOLE_CASE in one.by_prompt:
        return record | {"log": round(one.by_prompt[WHOLE_CASE], DECIMALS)}
    logs = [one.by_prompt.get(prompt) for prompt in prompts]
    return record | {"logs": [None if log is None else round(log, DECIMALS) for log in logs]}


# --- reading -------------------------------------------------------------------------------------


def load(path: Path) -> Snapshot:
    """The snapshot that `save` wrote.

    Raises:
        StoreError: it is not a pinned baseline, one of another format, or was broken by an edit.
    """
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} can't be read: {error}.") from None
    if not isinstance(document, dict) or "rows" not in document:
        raise StoreError(
            f"{path} is no pinned baseline;", hint="make one: specbench baseline save RUN -o FILE."
        )
    if document.get("format") != FORMAT:
        raise StoreError(
            f"{path} has format {document.get('format')!r}, this specbench reads {FORMAT}.",
            hint="Save the baseline again, or read it with the specbench that wrote it.",
        )
    try:
        return _restored(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise StoreError(
            f"{path}: {where}: {first['msg']}.", hint="Save the baseline again."
        ) from None
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise StoreError(
            f"{path}: series and prompts do not fit together ({error}).",
            hint="Save the baseline again.",
        ) from None


def _restored(document: dict[str, Any]) -> Snapshot:
    series: list[dict[str, Any]] = [{} for _ in document["rows"]]
    for one in document["series"]:
        if "log" in one:
            logs = {WHOLE_CASE: one["log"]}
        else:
            prompts = document["prompts"][document["rows"][one["row"]]["prompt_set"]]
            logs = dict(zip(prompts, one["logs"], strict=True))
        series[one["row"]][one["measure"]] = {
            "by_prompt": {prompt: log for prompt, log in logs.items() if log is not None},
            "starts": one["starts"],
            "noise": one.get("noise"),
        }
    rows = [{**row, "series": own} for row, own in zip(document["rows"], series, strict=True)]
    about = {k: v for k, v in document.items() if k not in ("format", "prompts", "series")}
    return Snapshot.model_validate({**about, "rows": rows})
