"""The life of one training run: a budget of time, progress lines, checkpoints, held-out reports."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from specbench.demo.train.data import Batch
from specbench.demo.train.distill import Candidates, MuonAdamW, learning_rate

Say = Callable[[str], None]
STEPS_PER_LINE = 10
SAVE_EVERY_S = 120
REPORT_EVERY_S = 600


@dataclass(frozen=True)
class Budget:
    """When a run is over: after so many seconds, or so many steps if that comes first."""

    seconds: float
    max_steps: int | None = None

    def spent(self, seconds: float, steps: int) -> float:
        """The share of the budget that is spent; 1 or more: over."""
        by_time = seconds / self.seconds if self.seconds > 0 else 1.0
        return by_time if self.max_steps is None else max(by_time, steps / max(1, self.max_steps))


@dataclass(frozen=True)
class Task:
    """What is trained: where batches come from, what to minimise, how to save and judge it."""

    batches: Iterator[tuple[Batch, Candidates]]
    loss: Callable[[Batch, Candidates, float], tuple[Tensor, dict[str, float]]]  # last: progress
    save: Callable[[], None]
    report: Callable[[], str]
    peak_rate: float


@dataclass(frozen=True)
class Summary:
    """What a finished run came to; `tokens` include padding."""

    seconds: float
    steps: int
    tokens: int
    held_out: str


class _Averages:
    """Moving averages over some 30 steps, unbiased from the first."""

    def __init__(self, keep: float = 0.97) -> None:
        self._keep = keep
        self._sums: dict[str, tuple[float, float]] = {}  # value and weight

    def add(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            total, weight = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (
                self._keep * total + (1 - self._keep) * value,
                self._keep * weight + (1 - self._keep),
            )

    def line(self) -> str:
        return "  ".join(
            f"{name} {total / weight:.3f}" for name, (total, weight) in self._sums.items()
        )


def train(
    model: nn.Module,
    task: Task,
    budget: Budget,
    checkpoint: Path,
    *,
    say: Say = print,
    clock: Callable[[], float] = time.process_time,
) -> Summary:
    """Train *model* until *budget* is spent, saving on the way and at the end.

    The clock counts the CPU time of this (single-threaded) process, so that neither the result
    nor the schedule of the learning rate hangs on what else the machine does.

    A *checkpoint* file that exists is taken up, its time and steps counting as spent; it is
    removed at the end.
    """
    optimizer = MuonAdamW(model.parameters())
    spent_before, steps = _restore(checkpoint, model, optimizer)
    if steps:
        say(f"going on after {steps} steps and {spent_before:.0f} s")
    begin = last_save = last_report = clock()
    averages, tokens = _Averages(), 0
    for batch, candidates in task.batches:
        progress = budget.spent(spent_before + clock() - begin, steps)
        if progress >= 1:
            break
        loss, values = task.loss(batch, candidates, progress)
        loss.backward()
        optimizer.step(learning_rate(progress, task.peak_rate))
        averages.add(values)
        steps, tokens = steps + 1, tokens + batch.tokens.numel()
        if steps % STEPS_PER_LINE == 0:
            rate = tokens / max(1e-9, clock() - begin)
            say(f"step {steps}  {progress:.0%}  {averages.line()}  {rate:.0f} tokens/s")
        if clock() - last_save > SAVE_EVERY_S:
            task.save()
            _keep(checkpoint, model, optimizer, spent_before + clock() - begin, steps)
            last_save = clock()
        if clock() - last_report > REPORT_EVERY_S:
            say(f"held out: {task.report()}")
            last_report = clock()
    task.save()
    checkpoint.unlink(missing_ok=True)
    return Summary(spent_before + clock() - begin, steps, tokens, task.report())


def _keep(path: Path, model: nn.Module, optimizer: MuonAdamW, seconds: float, steps: int) -> None:
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state(),
        "seconds": seconds,
        "steps": steps,
    }
    draft = path.with_suffix(".tmp")
    torch.save(state, draft)
    draft.replace(path)


def _restore(path: Path, model: nn.Module, optimizer: MuonAdamW) -> tuple[float, int]:
    if not path.exists():
        return 0.0, 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.restore(state["optimizer"])
    return float(state["seconds"]), int(state["steps"])


def checkpoint_path(out: Path) -> Path:
    """Beside *out*, which holds nothing but what an engine loads."""
    return out.with_name(out.name + ".checkpoint.pt")


def finished_path(out: Path) -> Path:
    """The file that says that *out* is trained to the end."""
    return out.with_name(out.name + ".trained.json")


def mark_finished(out: Path, summary: Summary) -> None:
    """Say that *out* is trained, and what the run came to."""
    finished_path(out).write_text(json.dumps(asdict(summary), indent=1), encoding="utf-8")
