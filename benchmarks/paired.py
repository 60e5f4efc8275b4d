"""Are the intervals true, and is pairing worth it? Three questions, on real engines.

    python benchmarks/paired.py measure RUN [--prompts 24] [--restarts 4] [--tokens 48] [--only-aa]
    python benchmarks/paired.py analyse RUN

`measure` has two vanilla engines and EAGLE k = 2 up together on the CPU trio, restarted a few times;
each prompt goes to all three in random order, and afterwards, on the same engines, to one after the
other in blocks. `analyse` reads the run folder and answers:

(a) A/A: how often do 95% intervals of vanilla against vanilla, whose ratio is 1, cover 1? Over many
    resamples of prompts and restarts, with the two engines' names swapped at random in each restart.
    With one restart they claim less, and that is what is asked of them: the ratio of that start.
    `--only-aa` measures nothing else, so that there is time for many restarts.
(b) How long does it take to know the speed-up to ±2%? Pairs, against means of blocks whose prompts
    are not matched (what `vllm bench sweep` reports), at the same cost a request.
(c) A machine that gets slower while it measures: what does it do to either ratio?
"""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from specbench import config, prepare, run, store
from specbench.analysis import speedup
from specbench.analysis.metrics import latency_ms, tpot_ms
from specbench.analysis.speedup import Key, Question, ratio_of
from specbench.records import RequestRecord
from specbench.render.progress import RunProgress
from specbench.store import RunStore
from specbench.sweep import Arm, Case, Plan, Stage, turns

AGAIN = "vanilla-again"
EAGLE = "eagle-k2"
RESAMPLES = 2000
Requests = dict[Key, RequestRecord]
WITHIN = 0.02
MOST_STARTS = 4  # that are drawn at a time
RAMP = 0.3  # the drift of (c): this much slower at the end than at the beginning


# --- measuring -----------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> None:
    """Run the engines; everything is kept in the run folder."""
    sets = [
        "speculation=[{method: eagle, model: demo:eagle, k: 2}]",
        f"prompts=[{{set: humaneval, limit: {args.prompts}, seed: 1}}]",
        f"max_tokens={args.tokens}",
        f"repeats={args.restarts}",
    ]
    path = config.find("demo")
    prepared = prepare.prepare(
        config.load(path, sets), config_path=path, prompt_folders=(args.datasets,), say=print
    )
    launches = {**prepared.launches, AGAIN: prepared.launches["vanilla"]}
    the_plan = plan_of(prepared.plan, args.restarts, args.tokens, only_aa=args.only_aa)
    prepared = replace(prepared, plan=the_plan, launches=launches)
    about = prepare.document(prepared, config_path=path, command=sys.argv)
    run_store = RunStore.create(args.run.parent, args.run.name, about)
    requests = prepared.requests
    with run_store, RunProgress(requests, 0, Console(stderr=True)) as progress:
        print(run.execute(prepared, run_store, progress))


def plan_of(made: Plan, restarts: int, tokens: int, *, only_aa: bool) -> Plan:
    """Three arms up together, interleaved first and in blocks then, for each restart."""
    vanilla, eagle = made.arms
    again = Arm(AGAIN, "vanilla", 0)
    arms = (vanilla, again) if only_aa else (vanilla, again, eagle)
    stages = []
    for restart in range(restarts):
        blocks = [
            (case(arm, "blocks", restart, tokens),) for arm in (vanilla, eagle) if not only_aa
        ]
        if restart % 2:
            blocks.reverse()
        together = tuple(case(arm, "pairs", restart, tokens) for arm in arms)
        stages.append(Stage(arms, (together, *blocks)))
    return Plan(arms, tuple(stages), "interleaved")


def case(arm: Arm, kind: str, restart: int, tokens: int) -> Case:
    """One arm's prompts in one restart, sent in pairs or as a block."""
    return Case(f"{arm.id}.{kind}.r{restart}", arm.id, "humaneval", tokens, 1, restart)


# --- (a) coverage --------------------------------------------------------------------------------


def requests_of(run_store: RunStore, arm: str, kind: str) -> Requests:
    """All requests of an arm, by key."""
    found: Requests = {}
    for planned in run_store.document["cases"]:
        if planned["id"].startswith(f"{arm}.{kind}."):
            for record in run_store.requests(planned["id"]):
                key = Key(record.prompt_id, record.turn, planned["repeat"], record.cycle)
                found[key] = record
    return found


def log_ratios(
    base: Mapping[Key, RequestRecord], arm: Mapping[Key, RequestRecord]
) -> dict[Key, float]:
    """The log ratio of TPOT of every pair."""
    pairs = ((key, tpot_ms(base[key]), tpot_ms(arm[key])) for key in base.keys() & arm.keys())
    return {key: math.log(a / b) for key, a, b in pairs if a and b}


def coverage(
    cells: Mapping[Key, float], prompts: int, restarts: int, question: Question, seed: int = 0
) -> tuple[float, float]:
    """Share of resamples whose interval covers the truth, and the mean half-width.

    Prompts are drawn with replacement, each draw a prompt of its own; restarts without, since two
    of a few being the same one would look as if starts did not differ. The truth is 1; of a single
    start, the ratio of that start over all its prompts.
    """
    rng = np.random.default_rng(seed)
    names = sorted({key.prompt_id for key in cells})
    repeats = sorted({key.repeat for key in cells})
    covered, widths = 0, 0.0
    for _ in range(RESAMPLES):
        chosen, kept = rng.choice(names, prompts), rng.choice(repeats, restarts, replace=False)
        signs = rng.choice([-1, 1], restarts)
        part = {
            Key(f"{name} {place}", 0, start): float(sign) * cells[Key(name, 0, int(repeat))]
            for place, name in enumerate(chosen)
            for start, (repeat, sign) in enumerate(zip(kept, signs, strict=True))
            if Key(name, 0, int(repeat)) in cells
        }
        # vanilla emits one token a step, so the times of its steps are the pairs themselves
        found = ratio_of(part, part, set_size=None, seed=0)
        interval = found.interval(question) if found else None
        assert interval is not None
        true = 1.0
        if restarts == 1:
            own = [value for key, value in cells.items() if key.repeat == kept[0]]
            true = math.exp(float(signs[0]) * float(np.mean(own)))
        covered += interval.low <= true <= interval.high
        widths += interval.half_width
    return covered / RESAMPLES, widths / RESAMPLES


def report_coverage(run_store: RunStore) -> None:
    """(a): the table."""
    vanilla = requests_of(run_store, "vanilla", "pairs")
    cells = log_ratios(vanilla, requests_of(run_store, AGAIN, "pairs"))
    prompts = len({key.prompt_id for key in cells})
    restarts = len({key.repeat for key in cells})
    by_restart = [
        math.exp(np.mean([v for key, v in cells.items() if key.repeat == r]))
        for r in range(restarts)
    ]
    spread = float(np.std(list(cells.values())))
    print(
        f"(a) vanilla against vanilla: {prompts} prompts x {restarts} restarts, ratios by restart"
    )
    print(f"    {', '.join(f'{value:.4f}' for value in by_restart)}; a pair's spread {spread:.2%}")
    speedup.RESAMPLES = 1000  # of each interval; 2,000 intervals a line
    most = min(restarts, MOST_STARTS)
    sizes = [(size, starts) for starts in range(1, most + 1) for size in (8, prompts // 2)]
    for size, starts in sizes:
        for question in ("like_these", "this_set"):
            share, width = coverage(cells, size, starts, question)
            print(
                f"    {size:3d} prompts, {starts} restart(s), {question:10s}: covers the truth in "
                f"{share:.1%}, ±{width:.2%}"
            )


# --- (b) how long it takes -----------------------------------------------------------------------


def report_cost(run_store: RunStore) -> None:
    """(b): requests and seconds to ±2%, pairs against blocks."""
    pairs = {arm: requests_of(run_store, arm, "pairs") for arm in ("vanilla", EAGLE)}
    blocks = {arm: requests_of(run_store, arm, "blocks") for arm in ("vanilla", EAGLE)}
    seconds = np.mean([latency_ms(r) for arm in pairs.values() for r in arm.values()]) * 2 / 1000
    cells = log_ratios(pairs["vanilla"], pairs[EAGLE])
    z = speedup.norm_quantile()
    spreads = {
        "pairs, on this set": residual_spread(cells),
        "pairs, on prompts like these": prompt_spread(cells),
        "blocks, prompts not matched": math.hypot(*(tpot_spread(arm) for arm in blocks.values())),
    }
    needed = {name: (z * spread / WITHIN) ** 2 for name, spread in spreads.items()}
    unpaired = needed["blocks, prompts not matched"]
    print(f"(b) to ±{WITHIN:.0%}, {seconds:.1f} s for a request to each engine")
    for name, count in needed.items():
        print(
            f"    {name:30s} spread {spreads[name]:.1%}: {math.ceil(count)} requests each,"
            f" {count * seconds:.0f} s, {unpaired / count:.1f} times as quick as blocks"
        )
    ratios = [block_ratio(blocks, repeat) for repeat in range(1 + max(k.repeat for k in cells))]
    paired = [
        math.exp(np.mean([v for key, v in cells.items() if key.repeat == repeat]))
        for repeat in range(len(ratios))
    ]
    print(f"    ratios by restart: pairs {numbers(paired)}; blocks {numbers(ratios)}")


def numbers(values: Sequence[float]) -> str:
    """Ratios in a line, with their spread."""
    return f"{', '.join(f'{v:.3f}' for v in values)} (spread {np.std(values, ddof=1):.3f})"


def residual_spread(cells: Mapping[Key, float]) -> float:
    """Standard deviation of a pair around its prompt's mean and its restart's."""
    names = sorted({key.prompt_id for key in cells})
    repeats = sorted({key.repeat for key in cells})
    table = np.full((len(names), len(repeats)), np.nan)
    for key, value in cells.items():
        table[names.index(key.prompt_id), repeats.index(key.repeat)] = value
    left = table - np.nanmean(table, 1, keepdims=True) - np.nanmean(table, 0) + np.nanmean(table)
    return float(np.sqrt(np.nansum(left**2) / ((len(names) - 1) * (len(repeats) - 1))))


def prompt_spread(cells: Mapping[Key, float]) -> float:
    """Standard deviation of the prompts' log ratios in one restart."""
    first = [value for key, value in cells.items() if key.repeat == 0]
    return float(np.std(first, ddof=1))


def tpot_spread(requests: Mapping[Key, RequestRecord]) -> float:
    """Standard deviation of log TPOT over the prompts of a block, mean over restarts."""
    by_repeat: dict[int, list[float]] = {}
    for key, record in requests.items():
        by_repeat.setdefault(key.repeat, []).append(math.log(tpot_ms(record) or math.nan))
    return float(np.mean([np.std(values, ddof=1) for values in by_repeat.values()]))


def block_ratio(blocks: Mapping[str, Requests], repeat: int) -> float:
    """Mean TPOT of the vanilla block over that of the EAGLE block, in one restart."""
    means = {
        arm: np.mean([tpot_ms(r) for key, r in requests.items() if key.repeat == repeat])
        for arm, requests in blocks.items()
    }
    return float(means["vanilla"] / means[EAGLE])


# --- (c) drift -----------------------------------------------------------------------------------


def report_drift(run_store: RunStore) -> None:
    """(c): the tape played back on a machine that slows down."""
    tape = {
        arm: {
            key.prompt_id: r
            for key, r in requests_of(run_store, arm, "pairs").items()
            if not key.repeat
        }
        for arm in ("vanilla", EAGLE)
    }
    names = sorted(tape["vanilla"])
    cases = [case(Arm(arm, "", 0), "pairs", 0, 0) for arm in tape]
    interleaved = [
        (turn.arm, unit[0])
        for unit, order in turns(cases, [[n] for n in names], "0")
        for turn in order
    ]
    blocks = [(arm, name) for arm in tape for name in names]
    true = paired_ratio(tape, dict(played(tape, interleaved, 0)))
    print(
        f"(c) {RAMP:.0%} slower at the end of the run than at its beginning; true ratio {true:.3f}"
    )
    for name, order in (("interleaved", interleaved), ("blocks", blocks)):
        found = paired_ratio(tape, dict(played(tape, order, RAMP)))
        print(f"    {name:12s} {found:.3f}, off by {found / true - 1:+.1%}")


def played(
    tape: Mapping[str, Mapping[str, RequestRecord]], order: Sequence[tuple[str, str]], ramp: float
) -> Iterator[tuple[tuple[str, str], float]]:
    """TPOT in ms of each request when they are sent in this *order*, one after the other."""
    whole = sum(latency_ms(tape[arm][name]) for arm, name in order)
    clock = 0.0
    for arm, name in order:
        slower = 1 + ramp * clock / whole
        clock += latency_ms(tape[arm][name]) * slower
        yield (arm, name), (tpot_ms(tape[arm][name]) or math.nan) * slower


def paired_ratio(
    tape: Mapping[str, Mapping[str, RequestRecord]], times: Mapping[tuple[str, str], float]
) -> float:
    """The geometric mean over prompts of vanilla / EAGLE."""
    logs = [math.log(times["vanilla", name] / times[EAGLE, name]) for name in tape["vanilla"]]
    return math.exp(sum(logs) / len(logs))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["measure", "analyse"])
    parser.add_argument("run", type=Path, help="a run folder (to make, or to read)")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--restarts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--only-aa", action="store_true", help="vanilla against vanilla, no more")
    parser.add_argument("--datasets", type=Path, default=Path("datasets"))
    args = parser.parse_args()
    if args.what == "measure":
        measure(args)
        return
    run_store = store.RunStore.open(args.run)
    report_coverage(run_store)
    if EAGLE in run_store.document["arms"]:
        report_cost(run_store)
        report_drift(run_store)


if __name__ == "__main__":
    main()
