"""Every prompt with both outputs, for the page's script to show: an index, and texts in blocks.

Texts stay as they were measured; the script makes visible what is not, and never takes them for
markup. Lengths of pieces count UTF-16 units, as the script's strings do.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbench.analysis.metrics import latency_ms, ttft_ms
from specbench.analysis.parity import compare
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


@dataclass(frozen=True)
class _Shown:
    """One arm's answer to a prompt, beside the baseline's: the first that differs, if any does."""

    key: Key
    base: RequestRecord | None
    own: RequestRecord | None
    compared: int
    identical: int
    position: int | None


@dataclass(frozen=True)
class _Entry:
    """One turn of one prompt, and what each arm made of it."""

    prompt: Prompt | None
    prompt_id: str
    turn: int
    category: str | None
    shown: Mapping[int, _Shown] = field(default_factory=dict)

    @property
    def differs(self) -> bool:
        """Whether any arm said something else than the baseline."""
        return any(one.position is not None for one in self.shown.values())

    @property
    def answers(self) -> list[RequestRecord]:
        """All that it shows."""
        both = [one for shown in self.shown.values() for one in (shown.base, shown.own)]
        return list({id(one): one for one in both if one is not None}.values())


def library(scene: Scene, budget: Budget) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
    """The index of a condition's prompts, and their texts in blocks, as far as *budget* goes."""
    arms = scene.others or list(scene.rows)
    entries = _entries(scene, arms)
    kept = {
        id(entry)
        for entry in sorted(entries, key=lambda entry: not entry.differs)
        if budget.takes(len(entry.answers), _characters(entry))
    }
    entries = [entry for entry in entries if id(entry) in kept]
    speedups = [{} if arm.is_baseline else prompt_speedups(*paired(scene, arm.arm)) for arm in arms]
    baseline = scene.baseline
    best = [row.arm for row in scene.fastest()]
    index = {
        "arms": [arm_name(arm) for arm in arms],
        "baseline": printable(baseline.arm) if baseline else None,
        "first": next((i for i, arm in enumerate(arms) if arm.arm in best[:1]), 0),
        "pieces": any(_pieces(one) for entry in entries for one in entry.answers),
        "prompts": [
            [
                printable(entry.prompt_id),
                entry.turn,
                None if entry.category is None else printable(entry.category),
                [_rounded(found.get(entry.prompt_id)) for found in speedups],
                [_parity(entry.shown.get(i)) for i in range(len(arms))],
            ]
            for entry in entries
        ],
    }
    texts = [_texts(entry) for entry in entries]
    return index, [texts[i : i + BLOCK] for i in range(0, len(texts), BLOCK)]


def _entries(scene: Scene, arms: Sequence[Row]) -> list[_Entry]:
    prompts = {
        prompt.id: prompt
        for cases in scene.cases.values()
        for case in cases[:1]
        for prompt in case.prompts
    }
    found: dict[tuple[str, int], _Entry] = {
        (prompt.id, turn): _Entry(prompt, prompt.id, turn, prompt.category, {})
        for prompt in prompts.values()
        for turn in range(len(prompt.turns))
    }
    for place, arm in enumerate(arms):
        base, own = ({}, paired(scene, arm.arm)[1]) if arm.is_baseline else paired(scene, arm.arm)
        keys: dict[tuple[str, int], list[Key]] = {}
        for key in sorted(base.keys() | own.keys()):
            keys.setdefault((key.prompt_id, key.turn), []).append(key)
        for at, of_prompt in keys.items():
            entry = found.get(at) or _Entry(None, *at, None, {})
            found[at] = entry
            shown = _shown(of_prompt, base, own)
            found[at] = _Entry(
                entry.prompt,
                *at,
                entry.category,
                {**entry.shown, place: shown},
            )
    return [entry for entry in found.values() if entry.shown]


def _shown(
    keys: Sequence[Key], base: Mapping[Key, RequestRecord], own: Mapping[Key, RequestRecord]
) -> _Shown:
    compared = identical = 0
    different: tuple[Key, int] | None = None
    for key in keys:
        if key not in base or key not in own:
            continue
        found = compare({key: base[key]}, {key: own[key]})
        if found is None:
            continue
        compared += 1
        identical += found.identical
        if found.differences and different is None:
            different = key, found.differences[0].position
    both = (key for key in keys if key in base and key in own)
    key = different[0] if different else next(both, keys[0])
    return _Shown(
        key, base.get(key), own.get(key), compared, identical, different[1] if different else None
    )


def _parity(shown: _Shown | None) -> list[int | None] | None:
    """How many outputs were compared, how many are identical, where the first one differs."""
    if shown is None or not shown.compared:
        return None
    return [shown.compared, shown.identical, shown.position]


def _characters(entry: _Entry) -> int:
    asked = sum(map(len, entry.prompt.turns)) if entry.prompt else 0
    return asked + sum(len(text) for text in {one.text for one in entry.answers})


def _texts(entry: _Entry) -> dict[str, Any]:
    pool: Pool = {}
    bases: dict[int, int] = {}
    base_answers: list[dict[str, Any]] = []
    answers = {}
    for place, shown in entry.shown.items():
        answer: dict[str, Any] = _answer(shown.own, pool) if shown.own else {}
        if shown.base is not None:
            if id(shown.base) not in bases:
                bases[id(shown.base)] = len(base_answers)
                base_answers.append(_answer(shown.base, pool))
            answer["b"] = bases[id(shown.base)]
        if shown.key.repeat or shown.key.cycle:
            answer["w"] = [shown.key.repeat, shown.key.cycle]
        answers[place] = answer
    asked = entry.prompt.turns[: entry.turn + 1] if entry.prompt else ()
    return {"q": list(asked), "T": list(pool), "A": answers, "B": base_answers}


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
