"""What a kill campaign found, and its table."""

from collections import Counter
from dataclasses import dataclass, field

COLUMNS = ("kind", "what", "times", "orphans", "lost", "tracebacks", "wrong exits", "gone after s")
FAULTS = (
    "torn",
    "locked",
    "twice",
    "order",
    "mixed",
    "table",
    "unmeasured",
    "unfinished",
    "litter",
)


@dataclass
class Tally:
    """What came of it, by what was done."""

    times: Counter[str] = field(default_factory=Counter)
    slowest_s: dict[str, float] = field(default_factory=dict)
    faults: list[tuple[str, str]] = field(default_factory=list)  # (what was done, fault)
    runs: int = 0
    forks: int = 0  # of the kills, those of a fork instead of a process started whole
    late: int = 0  # of the kills, those that a run in its last moments did not notice
    seconds: int = 0  # of the kills, those with a second signal
    measuring: int = 0  # of the kills, those in which this attempt had measured something
    pythons: int = 0  # tracebacks of Python's own start
    oldest_s: float = 0.0
    temporary: Counter[str] = field(default_factory=Counter)  # left in TMPDIR

    @property
    def kills(self) -> int:
        """How often specbench or a part of it was killed or stopped."""
        return sum(self.times.values())

    def add(self, other: "Tally") -> None:
        """Take in what another job found."""
        self.times += other.times
        self.temporary += other.temporary
        for what, slowest in other.slowest_s.items():
            self.slowest_s[what] = max(slowest, self.slowest_s.get(what, 0))
        self.faults += other.faults
        for name in ("runs", "forks", "late", "seconds", "measuring", "pythons"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.oldest_s = max(self.oldest_s, other.oldest_s)


def as_markdown(kind: str, tally: Tally) -> str:
    """The table of a campaign, and a sentence with the rest."""

    def faults(word: str, what: str | None = None) -> int:
        found = (text for done, text in tally.faults if what in (None, done))
        return sum(f"{word}: " in text[:80] for text in found)

    def row(name: str, times: int, what: str | None) -> str:
        words = ("orphans", "lost", "traceback", "wrong exit")
        cells = [kind, name, times, *(faults(word, what) for word in words)]
        of_what = [s for done, s in tally.slowest_s.items() if what in (None, done)]
        return f"| {' | '.join(map(str, cells))} | {max(of_what, default=0):.1f} |"

    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [row(what, times, what) for what, times in sorted(tally.times.items())]
    lines.append(row("all", tally.kills, None))
    others = ", ".join(f"{word} {faults(word)}" for word in FAULTS)
    left = ", ".join(f"{count} of {what}" for what, count in sorted(tally.temporary.items()))
    return "\n".join(lines) + (
        f"\n\n{tally.kills} kills ({tally.forks} of forks, {tally.measuring} of attempts that had "
        f"measured something, {tally.seconds} with a second signal, {tally.late} too late to be "
        f"noticed), {tally.runs} runs finished; {len(tally.faults)} faults, among them {others}. "
        f"Tracebacks of Python's own start: {tally.pythons}. The oldest answer that was not stored was {tally.oldest_s * 1e3:.0f} ms "
        f"old at the kill. Left in the temporary folder: {left or 'nothing'}."
    )
