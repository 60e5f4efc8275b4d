"""A config to the ordered list of what is measured: arms, stages, cases."""

import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from specbench.config import Config, Speculation
from specbench.errors import UserError

VANILLA = "vanilla"


@dataclass(frozen=True)
class Arm:
    """One engine set-up: the target with one method and k (`speculative_config` as vLLM gets it).

    Arms with the same `label` differ in k only.
    """

    id: str
    method: str
    k: int
    label: str = VANILLA
    draft: str | None = None
    speculative_config: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Case:
    """One cell of the sweep. `group` numbers the arms that are up together with a baseline.

    With a `rate` (requests/s, Poisson arrivals) `concurrency` is what the engine takes at once.
    """

    id: str
    arm: str
    prompt_set: str
    max_tokens: int
    concurrency: int
    repeat: int
    group: int = 0
    rate: float | None = None

    @property
    def conditions(self) -> tuple[str, int, int, int, int, float | None]:
        """What a case shares with the baseline's case that it is paired with."""
        return (
            self.prompt_set,
            self.max_tokens,
            self.concurrency,
            self.repeat,
            self.group,
            self.rate,
        )


@dataclass(frozen=True)
class Stage:
    """Engines that are up together, and the rounds measured on them.

    A round is the cases that share their conditions, one for each arm, sent in turns.
    """

    arms: tuple[Arm, ...]
    rounds: tuple[tuple[Case, ...], ...]


@dataclass(frozen=True)
class Plan:
    """Everything a run will do, in order."""

    arms: tuple[Arm, ...]
    stages: tuple[Stage, ...]
    schedule: Literal["interleaved", "blocks"]

    @property
    def together(self) -> int:
        """How many engines are up at once, at most."""
        return max(len(stage.arms) for stage in self.stages)

    @property
    def cases(self) -> list[Case]:
        """Every case, in the order in which they are measured."""
        return [case for stage in self.stages for round_ in stage.rounds for case in round_]

    @property
    def starts(self) -> int:
        """How many engines are started."""
        return sum(len(stage.arms) for stage in self.stages)


def arms_of(config: Config) -> tuple[Arm, ...]:
    """The baseline first (when asked for), then each method at each k. k = 0 is vanilla.

    Raises:
        UserError: two entries of `speculation` have the same label.
    """
    arms: dict[str, Arm] = {}
    if config.baseline and not config.is_attached:
        arms[VANILLA] = Arm(VANILLA, VANILLA, 0)
    labels: set[str] = set()
    for speculation in config.speculation:
        if speculation.label in labels and any(speculation.k):
            raise UserError(
                f"Two entries of `speculation` are called {speculation.label}: their arms would "
                "stand for one method.",
                hint="Give one of them a `name`.",
            )
        labels |= {speculation.label} if any(speculation.k) else set()
        for k in speculation.k:
            arm = _arm(speculation, k)
            arms[arm.id] = arm
    if not arms:
        arms[VANILLA] = Arm(VANILLA, VANILLA, 0)
    return tuple(arms.values())


def served_names(arms: Sequence[Arm]) -> dict[str, str]:
    """What each arm's model is called in a Triton repository: base_model, eagle_model, …

    A method with several k has them in the name: eagle_model_k3.
    """
    several = Counter(arm.label for arm in arms)
    names = {}
    for arm in arms:
        stem = "base" if arm.id == VANILLA else arm.label.removesuffix("_model")
        name = f"{_slug(stem)}_model"
        names[arm.id] = name if several[arm.label] == 1 else f"{name}_k{arm.k}"
    return names


def _arm(speculation: Speculation, k: int) -> Arm:
    if k == 0:
        return Arm(VANILLA, VANILLA, 0)
    return Arm(
        id=f"{speculation.label}-k{k}",
        method=speculation.method,
        k=k,
        label=speculation.label,
        draft=speculation.model,
        speculative_config=speculation.vllm_config(k),
    )


def plan(
    config: Config,
    set_names: Sequence[str],
    *,
    together: int | None = None,
    chosen: Mapping[str, Sequence[int]] | None = None,
) -> Plan:
    """The stages of a run over the prompt sets *set_names*, shuffled by the config's seed.

    Up to *together* engines are up at once (None: all that there are). Interleaved, the baseline is
    up with as many arms as that allows, in as few groups as it takes, each prompt goes to all of a
    group, and each group has its own measurement of the baseline. With room for one engine, or
    `schedule: blocks`, arms are measured one after the other. In both every repeat starts its
    engines anew, in an order shuffled anew, so that drift of the machine does not fall on the same
    arm every time.

    *chosen* are the k that `k: auto` came to, by the name of the speculation: each is one more arm,
    beside the baseline, after all else.

    Raises:
        UserError: two prompt sets have names that make the same folder.
    """
    arms = arms_of(config)
    rng = random.Random(config.seed)
    slugs = {_slug(name): name for name in set_names}
    for name in set_names:
        if slugs[_slug(name)] != name:
            raise UserError(
                f"The prompt sets {name!r} and {slugs[_slug(name)]!r} would share a folder.",
                hint="Rename one of them.",
            )
    together = len(arms) if together is None else together
    interleaved = config.schedule != "blocks" and together > 1 and len(arms) > 1
    groups = _groups(arms, together if interleaved else 1)
    stages = [
        _stage(config, set_names, group, repeat, number if interleaved and len(groups) > 1 else 0)
        for repeat in range(config.repeats)
        for number, group in rng.sample(list(enumerate(groups)), len(groups))
    ]
    more = _chosen_arms(config, chosen or {}, {arm.id for arm in arms})
    for number, arm in enumerate(more, len(groups)):
        group = _groups((*_baseline(arms), arm), together if interleaved else 1)
        stages += [
            _stage(config, set_names, part, repeat, number)
            for repeat in range(config.repeats)
            for part in group
        ]
    schedule: Literal["interleaved", "blocks"] = "interleaved" if interleaved else "blocks"
    return Plan((*arms, *more), tuple(stages), schedule)


def _baseline(arms: Sequence[Arm]) -> tuple[Arm, ...]:
    return tuple(arm for arm in arms if arm.id == VANILLA)


def _groups(arms: Sequence[Arm], together: int) -> list[tuple[Arm, ...]]:
    """The arms in groups of at most *together*, evenly filled; a shared baseline is in each."""
    shared = _baseline(arms) if together > 1 else ()
    others = [arm for arm in arms if arm not in shared]
    if not others:
        return [shared]
    count = -(-len(others) // (together - len(shared)))
    size, rest = divmod(len(others), count)
    ends = [(i + 1) * size + min(i + 1, rest) for i in range(count)]
    return [(*shared, *others[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


def _chosen_arms(
    config: Config, chosen: Mapping[str, Sequence[int]], there: AbstractSet[str]
) -> list[Arm]:
    arms = [
        _arm(speculation, k)
        for speculation in config.speculation
        if speculation.choose_k
        for k in chosen.get(speculation.label, ())
    ]
    return [arm for arm in arms if arm.id not in there]


def _stage(
    config: Config, set_names: Sequence[str], arms: tuple[Arm, ...], repeat: int, group: int
) -> Stage:
    closed = [(concurrency, None) for concurrency in config.concurrency]
    loads = [(config.in_flight, rate) for rate in config.rate] or closed
    conditions = product(set_names, config.max_tokens, loads)
    rounds = (
        tuple(_case(arm, *condition, repeat, group) for arm in arms) for condition in conditions
    )
    return Stage(arms, tuple(rounds))


def _case(
    arm: Arm,
    prompt_set: str,
    max_tokens: int,
    load: tuple[int, float | None],
    repeat: int,
    group: int,
) -> Case:
    concurrency, rate = load
    at = f"c{concurrency}" if rate is None else f"q{rate:g}"
    number = f".g{group}" if group else ""
    return Case(
        id=f"{arm.id}.{_slug(prompt_set)}.t{max_tokens}.{at}.r{repeat}{number}",
        arm=arm.id,
        prompt_set=prompt_set,
        max_tokens=max_tokens,
        concurrency=concurrency,
        repeat=repeat,
        group=group,
        rate=rate,
    )


def _slug(name: str) -> str:
    """A prompt set's name as part of a folder's."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "prompts"


def turns(
    round_: Sequence[Case], units: Sequence[Sequence[Any]], seed: str
) -> Iterator[tuple[Sequence[Any], Sequence[Case]]]:
    """Every unit of prompts with the round's cases in the order in which they are sent it.

    The order of the arms is drawn anew for every two units and turned round for the second of them:
    of two arms each is first as often, and a machine that drifts is not in their ratio even where
    the units are few. *seed* makes it repeatable.
    """
    rng = random.Random(seed)
    order: list[Case] = []
    for number, unit in enumerate(units):
        order = order[::-1] if number % 2 else rng.sample(list(round_), len(round_))
        yield unit, order
