"""Is every arm's speed-up known well enough yet? Asked while a round is being measured."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from specbench.analysis.outlines import Outline, Outlines, Pool
from specbench.analysis.speedup import Key, Question, Ratio, tpot_ratio
from specbench.config import Precision
from specbench.records import RequestRecord

QUESTIONS: Mapping[Question, str] = {
    "this_set": "on this prompt set",
    "like_these": "on prompts like these",
}


def _unread(_: int) -> RequestRecord:
    raise NotImplementedError("times and counts are all that is looked at")


@dataclass
class PrecisionWatch:
    """The requests of one round, as they end, against the precision that was asked for.

    `arms` says of each case but the baseline's whether its arm speculates. To be asked at the end of
    a pass only: a rule that looks after every prompt stops early too often (coverage of 87% at
    16 prompts). What engine restarts would change is not in it: each repeat is judged apart.
    """

    precision: Precision
    baseline: str
    arms: Mapping[str, bool]
    set_size: int | None = None
    _outlines: Outlines = field(default_factory=lambda: Outlines(Pool(), _unread))
    _records: dict[str, dict[Key, Outline]] = field(default_factory=dict)

    def add(self, case_id: str, record: RequestRecord) -> None:
        """Take up a request that ended."""
        key = Key(record.prompt_id, record.turn, 0, record.cycle)
        self._outlines.add(record, 0)
        self._records.setdefault(case_id, {})[key] = self._outlines[-1]

    def settled(self, case_id: str) -> str | None:
        """Why no more prompts are needed for this arm, in words; None while they are.

        More passes over the same prompts cannot say more of prompts like them than the spread of
        these prompts allows: then more prompts are needed, and their number is said.
        """
        ratio = self._ratio(case_id)
        if ratio is None:
            return None
        within, question = self.precision.within, QUESTIONS[self.precision.of]
        interval = ratio.interval(self.precision.of)
        if interval is not None and interval.half_width <= within:
            return f"±{interval.half_width:.1%} {question}"
        needed = self._prompts_needed(ratio)
        if needed and needed > ratio.prompts and interval and ratio.noise_from == "cycles":
            return (
                f"±{interval.half_width:.1%} {question}: for ±{within:.1%} it takes about {needed} "
                f"prompts, however often these {ratio.prompts} are sent"
            )
        return None

    def _prompts_needed(self, ratio: Ratio) -> int | None:
        needed = ratio.prompts_needed(self.precision.within)
        if needed is None or self.precision.of == "like_these":
            return needed
        if self.set_size is None or self.set_size <= ratio.prompts:
            return None  # every prompt of the set is sent: their spread does not count
        return math.ceil(needed * self.set_size / (needed + self.set_size))

    def reached(self, case_id: str) -> str:
        """How well this arm's speed-up is known, in words."""
        ratio = self._ratio(case_id)
        interval = ratio.interval(self.precision.of) if ratio else None
        known = f"±{interval.half_width:.1%}" if interval else "no interval"
        return f"{known} {QUESTIONS[self.precision.of]}"

    def _ratio(self, case_id: str) -> Ratio | None:
        return tpot_ratio(
            self._records.get(self.baseline, {}),
            self._records.get(case_id, {}),
            speculative=self.arms[case_id],
            set_size=self.set_size,
        )
