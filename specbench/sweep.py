"""A config to the ordered list of what is measured: arms, stages, cases."""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from specbench.config import Config, Speculation
from specbench.errors import UserError

VANILLA = "vanilla"


@dataclass(frozen=True)
class Arm:
    """One engine set-up: the target with one method and k (`speculative_config` as vLLM gets it)."""

    id: str
    method: str
    k: int
    draft: str | None = None
    speculative_config: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Case:
    """One cell of the sweep."""

    id: str
    arm: str
    prompt_set: str
    max_tokens: int
    concurrency: int
    repeat: int

    @property
    def conditions(self) -> tuple[str, int, int, int]:
        """What a case shares with the baseline's case that it is paired with."""
        return (self.prompt_set, self.max_tokens, self.concurrency, self.repeat)


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
        UserError: two entries of `speculation` make the same arm.
    """
    arms: dict[str, Arm] = {}
    if config.baseline and not config.engine.url:
        arms[VANILLA] = Arm(VANILLA, VANILLA, 0)
    for speculation in config.speculation:
        for k in speculation.k:
            arm = _arm(speculation, k)
            if arm.id in arms and arm.id != VANILLA:
                raise UserError(
                    f"Two entries of `speculation` make the arm {arm.id}.",
                    hint="Give one of them a `name`.",
                )
            arms[arm.id] = arm
    if not arms:
        arms[VANILLA] = Arm(VANILLA, VANILLA, 0)
    return tuple(arms.values())


def _arm(speculation: Speculation, k: int) -> Arm:
    if k == 0:
        return Arm(VANILLA, VANILLA, 0)
    name = speculation.name or speculation.method
    return Arm(
        id=f"{name}-k{k}",
        method=speculation.method,
        k=k,
        draft=speculation.model,
        speculative_config=speculation.vllm_config(k),
    )


def plan(config: Config, set_names: Sequence[str]) -> Plan:
    """The stages of a run over the prompt sets *set_names*, shuffled by the config's seed.

    `interleaved`: one stage, all arms up together, each started once. `blocks`: one arm at a
    time, in an order shuffled anew for each repeat, so that drift of the machine does not fall
    on the same arm every time.

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
    conditions = list(product(set_names, config.max_tokens, config.concurrency))
    if config.schedule == "interleaved" and len(arms) > 1:
        rounds = [
            tuple(_case(arm, *condition, repeat) for arm in arms)
            for repeat in range(config.repeats)
            for condition in conditions
        ]
        return Plan(arms, (Stage(arms, tuple(rounds)),))
    stages = []
    for repeat in range(config.repeats):
        for arm in rng.sample(arms, len(arms)):
            rounds = [(_case(arm, *condition, repeat),) for condition in conditions]
            stages.append(Stage((arm,), tuple(rounds)))
    return Plan(arms, tuple(stages))


def _case(arm: Arm, prompt_set: str, max_tokens: int, concurrency: int, repeat: int) -> Case:
    return Case(
        id=f"{arm.id}.{_slug(prompt_set)}.t{max_tokens}.c{concurrency}.r{repeat}",
        arm=arm.id,
        prompt_set=prompt_set,
        max_tokens=max_tokens,
        concurrency=concurrency,
        repeat=repeat,
    )


def _slug(name: str) -> str:
    """A prompt set's name as part of a folder's."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "prompts"


def turns(
    round_: Sequence[Case], units: Sequence[Sequence[Any]], seed: str
) -> Iterator[tuple[Case, Sequence[Any]]]:
    """Who is sent what, in order: every unit of prompts to each case of the round in turn.

    The order of the arms is drawn anew for each unit, so that none is always first; *seed* makes
    it repeatable.
    """
    rng = random.Random(seed)
    for unit in units:
        for case in rng.sample(list(round_), len(round_)):
            yield case, unit
