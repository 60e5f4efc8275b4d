"""How often does `specbench compare` call two equal nights different, and how small a change does it find?

    python benchmarks/compare_nights.py worlds            # nights of known truths (tests/test_compare.py)
    python benchmarks/compare_nights.py run FOLDER        # an A/A run of benchmarks/paired.py, split in two

The figures of docs/compare.md are from here.
"""

import argparse
import importlib.util
import itertools
import random
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median, stdev
from types import ModuleType

from specbench.analysis.cases import MeasuredCase
from specbench.analysis.compare import Change, compare, difference
from specbench.analysis.snapshot import Snapshot, SnapshotRow
from specbench.analysis.taking import snapshot
from specbench.records import RequestRecord
from specbench.render.read import measured_cases
from specbench.store import RunStore

EQUAL, CHANGED, WIDTHS = 1000, 200, 60
PROMPTS, DRAWS = 8, 60


def main() -> None:
    """Print one of the two tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["worlds", "run"])
    parser.add_argument("folder", nargs="?", type=Path)
    given = parser.parse_args()
    if given.what == "worlds":
        worlds()
    elif given.folder is None:
        parser.error("run: name the folder of an A/A run")
    else:
        real(RunStore.open(given.folder))


# --- known truths --------------------------------------------------------------------------------


def _tests() -> ModuleType:
    path = Path(__file__).parents[1] / "tests" / "test_compare.py"
    spec = importlib.util.spec_from_file_location("worlds", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["worlds"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def worlds() -> None:
    """For each nature: equal nights called equal, half of the interval, 10% and 5% found."""
    tests = _tests()
    nature = tests.Nature
    for one in (
        nature(),
        nature(repeats=4),
        nature(arms=1),
        nature(start=0, noise=0.05),
        nature(start=0.03, noise=0.01, arms=5),
        nature(start=0, repeats=1),
        nature(repeats=1),
    ):
        same = _share(tests.verdicts(one, EQUAL), "no difference shown")
        half = median(
            _half(
                tests.speedups(compare(tests.measured(one, 2 * i), tests.measured(one, 2 * i + 1)))
            )
            for i in range(WIDTHS)
        )
        found = [_share(tests.verdicts(one, CHANGED, slower=by), "worse") for by in (0.1, 0.05)]
        print(f"{one}: equal {same:.1%}, ±{half:.1%}, 10% {found[0]:.1%}, 5% {found[1]:.1%}")


def _share(verdicts: Iterable[str], wanted: str) -> float:
    found = list(verdicts)
    return found.count(wanted) / len(found)


def _half(changes: Sequence[Change]) -> float:
    first = changes[0]
    assert first.low is not None
    assert first.high is not None
    return (first.high - first.low) / 2


# --- real engines --------------------------------------------------------------------------------


def real(store: RunStore) -> None:
    """How far starts differ, and what halves of the run that are equal are called."""
    cases = _interleaved(store)
    for row in snapshot(store.document, cases).rows:
        for name in row.series.keys() & {"speedup", "tpot_ms"}:
            one = row.series[name]
            noise = f", noise {one.noise:.1%}" if one.noise else ""
            print(f"{row.arm} {name}: a start's mean differs by {stdev(one.starts):.1%}{noise}")
    prompts = {record.prompt_id for case in cases for record in case.records}
    for size in (1, 2):
        for (measure, verdict), count in sorted(_equal_halves(store, cases, size).items()):
            print(f"{size} starts a side, {measure}: {verdict} {count}")
    for before, after in _splits({case.repeat for case in cases}, 2):
        slow = [
            replace(c, records=[_slower(r.whole()) for r in c.records]) if c.k else c for c in cases
        ]
        comparison = compare(
            _half_of(store, cases, before, prompts), _half_of(store, slow, after, set(prompts))
        )
        for change in (c for row in comparison.rows if row.row.k for c in row.changes):
            if change.measure == "speedup" and change.low is not None and change.high is not None:
                print(
                    f"10% slower, {before} against {after}: {change.change:+.1%} "
                    f"[{change.low:+.1%}, {change.high:+.1%}] {change.verdict}"
                )


def _equal_halves(
    store: RunStore, cases: Sequence[MeasuredCase], size: int
) -> Counter[tuple[str, str]]:
    """The verdicts on parts of the run, *size* starts a side, that nothing tells from each other."""
    prompts = sorted({record.prompt_id for case in cases for record in case.records})
    ways = list(_splits({case.repeat for case in cases}, size))
    rng = random.Random(0)
    told: Counter[tuple[str, str]] = Counter()
    for draw in range(DRAWS):
        some = set(rng.sample(prompts, min(PROMPTS, len(prompts))))
        before, after = (_half_of(store, cases, part, some) for part in ways[draw % len(ways)])
        for row in compare(before, after).rows:
            told.update((change.measure, str(change.verdict)) for change in row.changes)
            if size == 1 and row.base and row.new:
                told["tpot_ms by its prompts alone", _by_prompts(row.base, row.new)] += 1
    return told


def _by_prompts(base: SnapshotRow, new: SnapshotRow) -> str:
    """What an interval would say that takes prompts and noise for all that there is."""
    _, low, high = difference(base.series["tpot_ms"], new.series["tpot_ms"], None)
    return "different" if low is None or high is None or low > 0 or high < 0 else "no difference"


def _interleaved(store: RunStore) -> list[MeasuredCase]:
    """The cases that were measured in pairs: an A/A run has each arm in blocks too."""
    arms = {arm: place for place, arm in enumerate(store.document["arms"])}
    ids = [c["id"] for c in sorted(store.document["cases"], key=lambda c: arms[c["arm"]])]
    both = zip(ids, measured_cases(store), strict=True)
    return [case for case_id, case in both if ".blocks." not in case_id]


def _splits(repeats: set[int], size: int) -> Iterable[tuple[tuple[int, ...], tuple[int, ...]]]:
    some = list(itertools.combinations(sorted(repeats), size))
    return ((a, b) for a in some for b in some if not set(a) & set(b))


def _half_of(
    store: RunStore, cases: Sequence[MeasuredCase], repeats: Sequence[int], prompts: set[str]
) -> Snapshot:
    kept = [case for case in cases if case.repeat in repeats]
    return snapshot(
        store.document,
        [replace(c, records=[r for r in c.records if r.prompt_id in prompts]) for c in kept],
    )


def _slower(record: RequestRecord) -> RequestRecord:
    first = record.chunk_ns[0]
    chunks = tuple(round(first + 1.1 * (at - first)) for at in record.chunk_ns)
    return record.model_copy(update={"chunk_ns": chunks, "end_ns": chunks[-1]})


if __name__ == "__main__":
    main()
