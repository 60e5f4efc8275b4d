"""Every prompt with both outputs, for the page's script to show: an index, and texts in blocks.

Texts stay as they were measured; the script makes visible what is not, and never takes them for
markup. Lengths of pieces count UTF-16 units, as the script's strings do.
"""

import itertools
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from markupsafe import Markup

from specbench.analysis.metrics import latency_ms, ttft_ms
from specbench.analysis.outlines import Request, identity
from specbench.analysis.parity import compare, is_same
from specbench.analysis.rows import Row
from specbench.analysis.speedup import Key
from specbench.records import Prompt, RequestRecord
from specbench.render.columns import printable
from specbench.render.html.figures import Scene, arm_name
from specbench.render.html.requests import paired, prompt_speedups
from specbench.render.html.steps import told

MOST_REQUESTS = 10_000  # whose texts a page holds, so that it opens within a second
MOST_CHARACTERS = 20_000_000
BLOCK = 40  # prompts whose texts are read together when one of them is opened
Pool = dict[str, int]
Json = Callable[[Sequence[Any]], Markup]


@dataclass
class Budget:
    """How many requests' texts a page still takes; `left_out` are those it could not."""

    requests: int = MOST_REQUESTS
    characters: int = MOST_CHARACTERS
    left_out: int = 0

    def takes(self, requests: int, characters: int) -> bool:
        """Whether so much goes in; it is then in, or counted as left out."""
        if requests > self.requests or characters > self.characters:
            self.left_out += requests
            return False
        self.requests -= requests
        self.characters -= characters
        return True


@dataclass(frozen=True, slots=True)
class _Shown:
    """One arm's answer to a prompt, beside the baseline's: the first that differs, if any does."""

    key: Key
    base: Request | None
    own: Request | None
    compared: int
    identical: int

    @property
    def position(self) -> int | None:
        """Where the two part; None where nothing differs."""
        if self.identical == self.compared or self.base is None or self.own is None:
            return None
        found = compare({self.key: self.base}, {self.key: self.own})
        return found.first_differences[0] if found else None


@dataclass(frozen=True, slots=True)
class _Entry:
    """One turn of one prompt, by its place among the prompts, and what each arm made of it."""

    prompt: int | None
    prompt_id: str
    turn: int
    shown: tuple[_Shown | None, ...]

    @property
    def differs(self) -> bool:
        """Whether any arm said something else than the baseline."""
        return any(one.identical < one.compared for one in self.shown if one)

    @property
    def answers(self) -> list[Request]:
        """All that it shows."""
        both = [one for shown in self.shown if shown for one in (shown.base, shown.own)]
        return list({identity(one): one for one in both if one is not None}.values())


def library(scene: Scene, budget: Budget, as_json: Json) -> tuple[dict[str, Any], list[Markup]]:
    """The index of a condition's prompts, and their texts in blocks, as far as *budget* goes."""
    arms = scene.others or list(scene.rows)
    prompts = next(case.prompts for cases in scene.cases.values() for case in cases)
    entries = _kept(_entries(scene, arms, prompts), prompts, budget)
    asked = [None if entry.prompt is None else prompts[entry.prompt] for entry in entries]
    speedups = [{} if arm.is_baseline else prompt_speedups(*paired(scene, arm.arm)) for arm in arms]
    baseline = scene.baseline
    best = [row.arm for row in scene.fastest()]
    category = [None if prompt is None else prompt.category for prompt in asked]
    blocks, has_pieces = [], False
    for first in range(0, len(entries), BLOCK):
        block = list(map(_texts, entries[first : first + BLOCK], asked[first : first + BLOCK]))
        has_pieces |= any("l" in answer for texts in block for answer in _told(texts))
        blocks.append(as_json(block))
    index = {
        "arms": [arm_name(arm) for arm in arms],
        "baseline": printable(baseline.arm) if baseline else None,
        "first": next((i for i, arm in enumerate(arms) if arm.arm in best[:1]), 0),
        "pieces": has_pieces,
        "prompts": [
            [
                printable(entry.prompt_id),
                entry.turn,
                None if of is None else printable(of),
                [_rounded(found.get(entry.prompt_id)) for found in speedups],
                list(map(_parity, entry.shown)),
            ]
            for entry, of in zip(entries, category, strict=True)
        ],
    }
    return index, blocks


def _kept(entries: Sequence[_Entry], prompts: Sequence[Prompt], budget: Budget) -> list[_Entry]:
    """What goes into the page, in the order of *entries*: those that differ go in first."""
    asked = array("q", (sum(map(len, prompt.turns)) for prompt in prompts))
    kept = bytearray(len(entries))
    for differs in (True, False):
        for place, entry in enumerate(entries):
            if entry.differs == differs:
                answers = entry.answers
                texts = {(one.text_hash, one.text_length) for one in answers}
                characters = 0 if entry.prompt is None else asked[entry.prompt]
                characters += sum(length for _, length in texts)
                kept[place] = budget.takes(len(answers), characters)
    return [entry for entry, is_kept in zip(entries, kept, strict=True) if is_kept]


def _entries(scene: Scene, arms: Sequence[Row], prompts: Sequence[Prompt]) -> list[_Entry]:
    places = {
        (prompt.id, turn): place
        for place, prompt in enumerate(prompts)
        for turn in range(len(prompt.turns))
    }
    shown: dict[tuple[str, int], list[_Shown | None]] = {at: [] for at in places}
    for place, arm in enumerate(arms):
        base, own = ({}, paired(scene, arm.arm)[1]) if arm.is_baseline else paired(scene, arm.arm)
        in_order = sorted(base.keys() | own.keys())
        for at, of_prompt in groupby(in_order, lambda key: (key.prompt_id, key.turn)):
            of_arms = shown.setdefault(at, [])
            of_arms += [None] * (place - len(of_arms))
            of_arms.append(_shown(list(of_prompt), base, own))
    return [
        _Entry(places.get(at), *at, (*of_arms, *[None] * (len(arms) - len(of_arms))))
        for at, of_arms in shown.items()
        if of_arms
    ]


def _shown(keys: Sequence[Key], base: Mapping[Key, Request], own: Mapping[Key, Request]) -> _Shown:
    both = [key for key in keys if key in base and key in own]
    told = [(key, same) for key in both if (same := is_same(base[key], own[key])) is not None]
    different = [key for key, same in told if not same]
    key = next(iter(different or both or keys))
    return _Shown(key, base.get(key), own.get(key), len(told), len(told) - len(different))


def _parity(shown: _Shown | None) -> list[int | None] | None:
    """How many outputs were compared, how many are identical, where the first one differs."""
    if shown is None or not shown.compared:
        return None
    return [shown.compared, shown.identical, shown.position]


def _texts(entry: _Entry, prompt: Prompt | None) -> dict[str, Any]:
    pool: Pool = {}
    bases: dict[tuple[int, int], int] = {}
    base_answers: list[dict[str, Any]] = []
    answers = {}
    for place, shown in enumerate(entry.shown):
        if shown is None:
            continue
        answer: dict[str, Any] = _answer(shown.own.whole(), pool) if shown.own else {}
        if shown.base is not None:
            if identity(shown.base) not in bases:
                bases[identity(shown.base)] = len(base_answers)
                base_answers.append(_answer(shown.base.whole(), pool))
            answer["b"] = bases[identity(shown.base)]
        if shown.key.repeat or shown.key.cycle:
            answer["w"] = [shown.key.repeat, shown.key.cycle]
        answers[place] = answer
    asked = prompt.turns[: entry.turn + 1] if prompt else ()
    return {"q": list(asked), "T": list(pool), "A": answers, "B": base_answers}


def _told(texts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All answers of a prompt."""
    return [*texts["A"].values(), *texts["B"]]


def _answer(record: RequestRecord, pool: Pool) -> dict[str, Any]:
    """One answer: t(ext) in the pool, l(engths) of its pieces, what steps made of each piece
    (`steps.Told`: a, d, s), and x: drafts, accepted and drafted tokens of it all.
    """
    answer: dict[str, Any] = {"t": pool.setdefault(record.text, len(pool))}
    if record.error is not None:
        answer["e"] = record.error
    elif record.chunk_ns:
        answer["ms"] = [round(ttft_ms(record), 1), round(latency_ms(record), 1)]
        answer["n"] = record.output_tokens
    if record.spec is not None:
        answer["x"] = [record.spec.drafts, record.spec.accepted, record.spec.draft_tokens]
    if (lengths := _pieces(record)) is not None:
        answer["l"] = lengths
        if found := told(record):
            same = found.steps[0] == 0 and len(set(found.drafted[1:])) == 1
            answer["a"] = found.accepted
            answer["d"] = found.drafted[1] if same else found.drafted
            if found.steps != [0, *[1] * (len(lengths) - 1)]:
                answer["s"] = found.steps
    return answer


def _pieces(record: RequestRecord) -> list[int] | None:
    """How long each chunk's text is; None where that is not known."""
    counts = record.chunk_chars
    if not counts or sum(counts) != len(record.text) or len(counts) != len(record.chunk_ns):
        return None
    if record.text.isascii():
        return list(counts)
    ends = list(itertools.accumulate(counts))
    return [
        len(record.text[end - count : end].encode("utf-16-le", "surrogatepass")) // 2
        for end, count in zip(ends, counts, strict=True)
    ]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def prompts_of(indexes: Iterable[Mapping[str, Any]]) -> int:
    """How many prompts (turns apart) the page shows."""
    return sum(len(index["prompts"]) for index in indexes)
