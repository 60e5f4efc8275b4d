"""No ratio is of two hosts' times: pairs are of one host, and a row says what was left out."""

import json
from collections.abc import Callable, Sequence

import pytest

from specbench.analysis.cases import MeasuredCase
from specbench.analysis.curves import curves
from specbench.analysis.rows import Row, rows
from specbench.analysis.taking import _ratios
from specbench.records import EngineFacts, RequestRecord
from specbench.render.report import Findings, as_csv, as_json

Build = Callable[..., RequestRecord]
TIMES = {"vanilla": 20.0, "eagle-k1": 10.0}
SLOW = 7.0  # times as slow is the other host


def case(record: Build, arm: str, hosts: Sequence[str | None], prompts: int = 8) -> MeasuredCase:
    """A start on each host; prompts go to the starts in turn."""

    def request(n: int) -> RequestRecord:
        start = n % len(hosts)
        tpot = TIMES[arm] * (SLOW if hosts[start] == "slow" else 1) * (1 + 0.01 * n)
        spec = {"drafts": 5, "draft_tokens": 5, "accepted": 5, "accepted_histogram": (0, 5)}
        return record(
            f"p{n}",
            start=start,
            chunks=[100 + tpot * at for at in range(11)],
            tokens=11,
            chunk_tokens=(1,) * 11,
            spec=spec if arm != "vanilla" else None,
        )

    def engine(start: int, host: str | None) -> EngineFacts:
        about = {"url": "http://h", "served_model": "m", "started_at": "2026", "kind": "vllm"}
        facts = {**about, "arm": arm, "start": start, "argv": ("vllm",), "version": "1"}
        return EngineFacts.model_validate({**facts, "host": host})

    return MeasuredCase(
        arm=arm,
        method=arm.partition("-")[0],
        k=int(arm != "vanilla"),
        prompt_set="he",
        max_tokens=11,
        concurrency=1,
        repeat=0,
        expected_requests=prompts,
        records=[request(n) for n in range(prompts)],
        spans=[],
        status="ok",
        label=arm.partition("-")[0],
        engines=[engine(start, host) for start, host in enumerate(hosts)],
    )


def both(
    record: Build, base: Sequence[str | None], arm: Sequence[str | None]
) -> tuple[MeasuredCase, MeasuredCase]:
    return case(record, "vanilla", base), case(record, "eagle-k1", arm)


def row(record: Build, base: Sequence[str | None], arm: Sequence[str | None]) -> Row:
    return rows(both(record, base, arm), baseline="vanilla")[1]


def checks(found: Row) -> list[str]:
    return [flag.check for flag in found.flags]


def test_pairs_of_two_hosts_are_left_out_and_named(record: Build) -> None:
    """The arm went on elsewhere after half of the prompts' baseline was measured there."""
    found = row(record, ("fast",), ("fast", "slow"))
    assert found.speedup is not None
    assert found.speedup.tpot is not None
    assert found.speedup.tpot.value == pytest.approx(2)
    assert (found.speedup.pairs, found.speedup.unpaired) == (4, 4)
    (flag,) = [flag for flag in found.flags if flag.check == "hosts"]
    assert flag.finding == (
        "4 requests were answered on another host than the baseline's and are in no ratio "
        "(baseline: fast; here: fast, slow)"
    )


def test_arms_that_moved_together_are_paired_on_each_host(record: Build) -> None:
    found = row(record, ("fast", "slow"), ("fast", "slow"))
    assert found.speedup is not None
    assert found.speedup.tpot is not None
    assert found.speedup.tpot.value == pytest.approx(2)
    assert found.speedup.pairs == 8
    assert "hosts" not in checks(found)


def test_without_a_pair_on_one_host_there_is_no_ratio(record: Build) -> None:
    found = row(record, ("fast",), ("slow",))
    assert found.speedup is not None
    assert (found.speedup.tpot, found.speedup.pairs) == (None, 0)
    assert "hosts" in checks(found)


@pytest.mark.parametrize(
    ("base", "arm"), [((None,), ("a",)), (("a",), (None,)), ((None,), (None,)), (("a",), ("a",))]
)
def test_a_host_that_is_not_known_is_taken_for_the_same(
    record: Build, base: Sequence[str | None], arm: Sequence[str | None]
) -> None:
    found = row(record, base, arm)
    assert found.speedup is not None
    assert found.speedup.pairs == 8
    assert "hosts" not in checks(found)


def test_step_times_and_the_best_k_are_of_one_host(record: Build) -> None:
    (curve,) = curves(both(record, ("fast",), ("fast", "slow")), baseline="vanilla")
    assert curve.model is not None
    assert curve.model.requests == 4
    assert curve.best is not None
    assert curve.best.speedup == pytest.approx(2)


def test_what_a_later_run_is_compared_with_is_of_one_host(record: Build) -> None:
    base, arm = both(record, ("fast",), ("fast", "slow"))
    assert sorted(cell.prompt for cell in _ratios([arm], [base])) == ["p0", "p2", "p4", "p6"]
    assert len(_ratios([arm], [case(record, "vanilla", (None,))])) == 8


def test_a_row_names_its_hosts_in_json_and_csv(record: Build) -> None:
    found = rows(both(record, ("fast",), ("fast", "slow")), baseline="vanilla")
    about = ("id", "config", "machine", "vllm", "prompt_sets")
    run: dict[str, object] = {name: {} for name in about}
    hosts = [one["hosts"] for one in json.loads(as_json(run, Findings(found)))["rows"]]
    assert hosts == [["fast"], ["fast", "slow"]]
    assert ",fast; slow," in as_csv(run, Findings(found))
