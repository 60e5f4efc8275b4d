"""Stretches of time, and what a counter that was read now and then counted during them."""

from dataclasses import dataclass

import numpy as np

LONGEST_GAP = 5.0  # typical sample intervals; over a longer one nothing is known

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


class Spans:
    """The time with a request in flight: disjoint, in order."""

    def __init__(self, starts: Ints, ends: Ints, *, gap_ns: int = 0) -> None:
        order = np.lexsort((ends, starts))
        starts, ends = starts[order], np.maximum.accumulate(ends[order])
        begins = np.append(True, starts[1:] > ends[:-1] + gap_ns)[: len(starts)]
        self.starts: Ints = starts[begins]
        self.ends: Ints = ends[np.append(begins[1:], True)[: len(starts)]]

    @property
    def seconds(self) -> float:
        """All of it."""
        return float((self.ends - self.starts).sum()) / 1e9

    @property
    def mean_s(self) -> float:
        """The mean length of a span."""
        return self.seconds / len(self.starts)

    def before(self, at_ns: Ints) -> Floats:
        """Seconds of it that lie before each time."""
        edges = np.stack([self.starts, self.ends], axis=1).ravel()
        passed = np.repeat(np.cumsum(self.ends - self.starts), 2).astype(float)
        passed[::2] -= self.ends - self.starts
        # Nanoseconds since boot fit a float exactly for a hundred days, and to some ns from then on.
        return np.asarray(np.interp(at_ns, edges, passed) / 1e9)

    def hold(self, at_ns: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which of these times are in it."""
        at = np.searchsorted(self.starts, at_ns, "right") - 1
        return np.asarray((at >= 0) & (at_ns <= self.ends[np.maximum(at, 0)]))


@dataclass(frozen=True)
class Counter:
    """Joules since some moment, sample by sample; `start` numbers the sampler that took each."""

    at_ns: Ints
    joules: Floats
    start: Ints

    def over(self, spans: Spans) -> tuple[float, float]:
        """Joules and seconds of those *spans* whose every sample interval is known."""
        if len(self.at_ns) < 2:
            return 0.0, 0.0
        apart = np.diff(self.at_ns)
        hole = (apart > LONGEST_GAP * np.median(apart)) | (np.diff(self.start) != 0)
        holes = np.concatenate([[0], np.cumsum(hole)])
        first = np.searchsorted(self.at_ns, spans.starts, "right") - 1
        last = np.searchsorted(self.at_ns, spans.ends, "left")
        inside = (first >= 0) & (last < len(self.at_ns))
        known = inside & (holes[np.minimum(last, len(hole))] == holes[np.maximum(first, 0)])
        starts, ends = spans.starts[known], spans.ends[known]
        spent = np.interp(ends, self.at_ns, self.joules) - np.interp(
            starts, self.at_ns, self.joules
        )
        return float(spent.sum()), float((ends - starts).sum()) / 1e9
