"""A plan as units that are measured apart, each on one host, and what each takes of that host.

A ratio is between cases that share their repeat and group, so these stay in one unit: the stage of
an interleaved plan, all stages of a repeat where engines are up one after the other.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from specbench.config import Config
from specbench.errors import UserError
from specbench.prepare import Prepared
from specbench.sweep import VANILLA, Case, Plan

# One GPU for each of what these make together: vLLM's own world size, and its replicas.
GPU_FACTORS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "data_parallel_size",
)
SPREADS = ("distributed_executor_backend", "data_parallel_backend")


@dataclass(frozen=True)
class Needs:
    """What a unit takes of a node.

    `gpus` are shared by the engines that are up together, as they are without a cluster. With
    `whole_node` it takes all cores: CPU engines are bound to them.
    """

    cpus: int
    gpus: int = 0
    whole_node: bool = False

    def __str__(self) -> str:
        if self.whole_node:
            return "a node's CPUs"
        cpus = f"{self.cpus} CPU{'s' if self.cpus > 1 else ''}"
        return f"{cpus} and {self.gpus} GPU{'s' if self.gpus > 1 else ''}" if self.gpus else cpus


@dataclass(frozen=True)
class Unit:
    """Stages that one host measures, by their place in the plan; `number` is from 1.

    `starts` says how often each of its arms is started.
    """

    number: int
    stages: tuple[int, ...]
    cases: tuple[Case, ...]
    starts: Mapping[str, int]

    def __str__(self) -> str:
        repeats = {case.repeat for case in self.cases}
        arms = ", ".join(self.starts)
        return f"unit {self.number} ({arms}; repeat {', '.join(map(str, sorted(repeats)))})"


def units_of(plan: Plan) -> list[Unit]:
    """The plan in units, in its order. Without a baseline there is no ratio: each stage is one."""
    has_ratios = any(arm.id == VANILLA for arm in plan.arms)
    together: dict[tuple[int, ...], list[int]] = {}
    for place, stage in enumerate(plan.stages):
        first = stage.rounds[0][0]
        key = (first.repeat, first.group) if has_ratios else (place,)
        together.setdefault(key, []).append(place)
    units = []
    for number, places in enumerate(together.values(), 1):
        stages = [plan.stages[place] for place in places]
        cases = tuple(case for stage in stages for round_ in stage.rounds for case in round_)
        starts = Counter(arm.id for stage in stages for arm in stage.arms)
        units.append(Unit(number, tuple(places), cases, starts))
    return units


def needs_of(prepared: Prepared, unit: Unit) -> Needs:
    """What the engines of *unit* take, by their arguments.

    Raises:
        UserError: a number of GPUs in them is none.
    """
    if prepared.config.load.client == "replay":
        return Needs(cpus=1)
    if prepared.installation is not None and prepared.installation.is_cpu:
        return Needs(cpus=1, whole_node=True)
    up = max(len(prepared.plan.stages[place].arms) for place in unit.stages)
    return Needs(cpus=up + 1, gpus=_gpus(prepared.config))  # an API server each, and the client


def _gpus(config: Config) -> int:
    count = 1
    for key, value in _arguments(config).items():
        if key in GPU_FACTORS and value is not None:
            if isinstance(value, bool) or not str(value).isdecimal() or int(str(value)) < 1:
                raise UserError(f"engine.args.{key} is {value!r}.", hint="Write a number from 1.")
            count *= int(str(value))
    return count


def _arguments(config: Config) -> dict[str, object]:
    more = config.engine.extra_args.items()
    return {**config.engine.args, **{k.lstrip("-").replace("-", "_"): v for k, v in more}}


def whole_node_cpus(totals: list[float]) -> int:
    """How many CPUs to ask for so that no node, with *totals* of them, takes two such units.

    The smaller nodes that have as many take one as well.
    """
    largest = max(totals, default=1)
    enough = [total for total in totals if 2 * total > largest]
    return max(1, int(min(enough, default=1)))


def check(config: Config) -> None:
    """Refuse what cannot be spread over hosts.

    Raises:
        UserError: with the reason.
    """
    if config.engine.kind == "triton":
        raise UserError(
            "--executor ray starts vLLM engines; a Triton server (engine.kind: triton) is one place.",
            hint="Leave --executor out.",
        )
    if config.engine.url is not None:
        raise UserError(
            "--executor ray starts engines on the hosts; engine.url is a server that is already up.",
            hint="Leave --executor out, or engine.url.",
        )
    if "CUDA_VISIBLE_DEVICES" in config.engine.env:
        raise UserError(
            "engine.env has CUDA_VISIBLE_DEVICES, and with --executor ray it is Ray that says which "
            "GPUs are whose.",
            hint="Leave it out.",
        )
    arguments = _arguments(config)
    for key in SPREADS:
        if arguments.get(key) == "ray":
            raise UserError(
                f"engine.args.{key} is ray: that engine spreads over hosts by itself, and "
                "--executor ray keeps each engine on one.",
                hint="Use mp, or leave --executor out.",
            )
