"""The k curve of a method as one line of text: eagle  humaneval  k 1..5  ▂▅▇▆▃  best 3 (1.42x)."""

from collections.abc import Sequence

from specbench.analysis.cases import Condition
from specbench.analysis.rows import Row, best_of, is_sound
from specbench.render.columns import printable

BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.:-=+*#"
FEWEST = 3  # k: two are no curve
FLAT = 1.02  # the highest over the lowest: less is drawn as a level line


def k_curves(rows: Sequence[Row], *, plain: bool = False) -> list[str]:
    """A line for each method and condition with a speed-up at three k and more, in columns.

    Heights go from the lowest to the highest speed-up of the line, so only shapes compare between
    lines. *plain* is for a terminal that knows ASCII only. The best k is one without a flag if there is one; a
    question mark says that there is none.
    """
    curves: dict[tuple[str, Condition, str | None], dict[int, Row]] = {}
    for row in rows:
        if row.k and row.speedup and row.speedup.tpot:
            curves.setdefault((row.label, row.condition, row.part), {})[row.k] = row
    found = {at: of_k for at, of_k in curves.items() if len(of_k) >= FEWEST}
    conditions = {condition for _, condition, _ in found}
    lines = []
    for (label, condition, part), of_k in found.items():
        where = [condition.prompt_set, part or ""]
        where.append(_where(condition, conditions))
        ks = sorted(of_k)
        line = sparkline([_value(of_k[k]) for k in ks], plain=plain)
        lines.append((label, " ".join(filter(None, where)), f"k {_range(ks)}", line, _best(of_k)))
    return _aligned([[printable(cell) for cell in line] for line in lines])


def sparkline(values: Sequence[float], *, plain: bool = False) -> str:
    """A character for each value; its height is linear from the lowest to the highest."""
    marks = ASCII if plain else BLOCKS
    low, high = min(values), max(values)
    if low > 0 and high / low < FLAT:
        return marks[len(marks) // 2] * len(values)
    return "".join(marks[round((v - low) / (high - low) * (len(marks) - 1))] for v in values)


def _value(row: Row) -> float:
    assert row.speedup is not None
    assert row.speedup.tpot is not None
    return row.speedup.tpot.value


def _where(condition: Condition, conditions: set[Condition]) -> str:
    """What tells this condition from the others beside its prompt set."""
    parts = []
    if len({one.max_tokens for one in conditions}) > 1:
        parts.append(f"{condition.max_tokens} tokens")
    if len({one.load for one in conditions}) > 1:
        parts.append(condition.load)
    return ", ".join(parts)


def _range(ks: Sequence[int]) -> str:
    return f"{ks[0]}..{ks[-1]}" if ks[-1] - ks[0] == len(ks) - 1 else ",".join(map(str, ks))


def _best(of_k: dict[int, Row]) -> str:
    row = best_of(of_k.values())
    assert row is not None  # each has a speed-up
    return f"best {row.k} ({_value(row):.2f}x{'' if is_sound(row) else '?'})"


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    from rich.cells import cell_len, set_cell_size

    wide = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(set_cell_size(c, w) for c, w in zip(line, wide, strict=True)).rstrip()
        for line in lines
    ]
