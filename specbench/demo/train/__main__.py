"""The whole recipe as one command: recorded chats, new ones, head, draft model, acceptance lengths.

Run it again after an interruption and it goes on where it was: every stage keeps its work in
files and skips what is there.
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from specbench.demo.train.workers import Worker, exit_code, run_together
from specbench.errors import UserError

SEEDS = (0, 1)
GENERATORS = 2
WAVE_SIZE = 128
INTERRUPTED = 130  # the shell's code for a command that Ctrl-C ended


@dataclass(frozen=True)
class Plan:
    """What was asked for, and where everything lies in the work folder."""

    target: Path
    work: Path
    minutes_generate: float
    minutes_train: float
    eval_prompts: Path | None = None
    init: Path | None = None
    init_draft: Path | None = None
    wave_size: int = WAVE_SIZE
    waves: Path | None = None
    eval_waves: Path | None = None
    head: Path | None = None
    draft: Path | None = None

    @property
    def data(self) -> Path:
        """The training waves."""
        return self.waves or self.work / "data"

    @property
    def eval_data(self) -> Path:
        """The target's greedy answers to the evaluation prompts."""
        return self.eval_waves or self.work / "eval"

    @property
    def eagle(self) -> Path:
        """The head that is evaluated: the mean of the seeds, or the one that was named."""
        return self.head or self.work / "eagle"

    @property
    def delta(self) -> Path:
        """The draft model's delta."""
        return self.draft or self.work / "draft-delta"

    def seed(self, seed: int) -> Path:
        """The head of one seed."""
        return self.work / f"eagle-seed{seed}"

    def worker(self, name: str, module: str, **flags: object) -> Worker:
        """A worker that runs *module*; a flag that is None is left out."""
        argv = [sys.executable, "-m", f"specbench.demo.train.{module}"]
        for flag, value in {"target": self.target, **flags}.items():
            if value is not None:
                argv += [f"--{flag.replace('_', '-')}", str(value)]
        return Worker(name, tuple(argv), self.work / "logs" / f"{name.replace(' ', '-')}.log")


def say(line: str) -> None:
    """Print one progress line at once."""
    print(line, flush=True)


def generate(plan: Plan) -> None:
    """Write the prompts, the training waves and, where asked for, the evaluation waves."""
    from specbench.demo.train import prompts

    texts = prompts.read_evaluation_texts(plan.eval_prompts) if plan.eval_prompts else []
    training = plan.work / "prompts.json"
    if not training.exists():
        say("collecting prompts from the installed packages")
        built = prompts.build_prompts(plan.target, [text.text for text in texts])
        prompts.write_prompts(training, built)
    say(f"{len(prompts.read_prompts(training))} training prompts")
    finished = plan.work / "generated.json"
    if not finished.exists():
        _generate_in_waves(plan, "generate", training, plan.data, wave_size=plan.wave_size)
        finished.write_text(json.dumps({"minutes": plan.minutes_generate}), encoding="utf-8")
    if texts:
        asked = plan.work / "eval-prompts.json"
        prompts.write_prompts(asked, prompts.evaluation_prompts(plan.target, texts))
        size = -(-len(texts) // GENERATORS)
        _generate_in_waves(plan, "answer", asked, plan.eval_data, wave_size=size, finish=True)


def _generate_in_waves(
    plan: Plan, name: str, asked: Path, out: Path, *, wave_size: int, finish: bool = False
) -> None:
    minutes = None if finish else plan.minutes_generate
    run_together(
        [
            plan.worker(
                f"{name} {index}",
                "generate",
                prompts=asked,
                out=out,
                wave_size=wave_size,
                minutes=minutes,
                first=index,
                stride=GENERATORS,
            )
            for index in range(GENERATORS)
        ],
        say=say,
    )


def recall(plan: Plan) -> None:
    """Give the chats of an earlier training their states back: much quicker than new ones."""
    run_together(
        [
            plan.worker(f"recall {i}", "recorded", out=plan.data, first=i, stride=GENERATORS)
            for i in range(GENERATORS)
        ],
        say=say,
    )


def train_heads(plan: Plan) -> None:
    """Train one head for each seed, side by side."""
    from specbench.demo.train.loop import finished_path

    waiting = [seed for seed in SEEDS if not finished_path(plan.seed(seed)).exists()]
    for seed in set(SEEDS) - set(waiting):
        say(f"{plan.seed(seed)} is trained; remove {finished_path(plan.seed(seed))} to train again")
    run_together(
        [
            plan.worker(
                f"eagle seed {seed}",
                "eagle",
                data=plan.data,
                out=plan.seed(seed),
                minutes=plan.minutes_train,
                seed=seed,
                init=plan.init,
            )
            for seed in waiting
        ],
        say=say,
    )


def average(plan: Plan) -> None:
    """Make the head: the mean of the seeds' weights."""
    from specbench.demo.train.eagle import average_heads

    average_heads([plan.seed(seed) for seed in SEEDS], plan.work / "eagle", plan.target)
    say(f"the mean of {len(SEEDS)} heads is {plan.work / 'eagle'}")


def train_draft(plan: Plan) -> None:
    """Train the draft model."""
    from specbench.demo.train.loop import finished_path

    out = plan.work / "draft-delta"
    if finished_path(out).exists():
        say(f"{out} is trained; remove {finished_path(out)} to train again")
        return
    worker = plan.worker(
        "draft",
        "draft",
        data=plan.data,
        out=out,
        minutes=plan.minutes_train,
        init=plan.init_draft,
    )
    run_together([worker], say=say)


def evaluate(plan: Plan) -> None:
    """Print acceptance lengths on the evaluation waves and write them to acceptance.json."""
    from specbench.demo.train import data, draft, eagle
    from specbench.demo.train.evaluate import acceptance_by_kind, render, summary

    waves = data.wave_paths(plan.eval_data)
    if not waves:
        raise UserError(
            f"{plan.eval_data} holds no evaluation waves.",
            hint="Give --eval-prompts to the generate stage.",
        )
    loaders: dict[Path, Callable[[Path, Path], eagle.Head | draft.DraftModel]] = {
        plan.eagle: eagle.load_head,
        plan.delta: draft.load_delta,
    }
    examples = [example for wave in waves for example in data.read_wave(wave)]
    found = {}
    for folder, load in loaders.items():
        if (folder / "model.safetensors").exists():
            acceptances = acceptance_by_kind(load(folder, plan.target), examples)
            say(f"{folder}\n{render(acceptances)}")
            found[str(folder)] = summary(acceptances)
    if not found:
        raise UserError(f"There is neither {plan.eagle} nor {plan.delta} to evaluate.")
    plan.work.mkdir(parents=True, exist_ok=True)
    (plan.work / "acceptance.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


STAGES: dict[str, Callable[[Plan], None]] = {
    "recall": recall,
    "generate": generate,
    "eagle": train_heads,
    "average": average,
    "draft": train_draft,
    "evaluate": evaluate,
}


def parse(argv: Sequence[str] | None) -> tuple[Plan, list[str]]:
    """The plan and the stages to run, from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m specbench.demo.train",
        description="Train the demo's EAGLE head and draft model. Run again to go on.",
    )

    def add_folder(flag: str, text: str, *, required: bool = False) -> None:
        parser.add_argument(flag, type=Path, metavar="DIR", required=required, help=text)

    add_folder("--target", "the target's checkpoint", required=True)
    add_folder("--work", "where everything is kept", required=True)
    parser.add_argument("--minutes-generate", type=float, default=120, metavar="N")
    parser.add_argument(
        "--minutes-train", type=float, default=60, metavar="N", help="for each model"
    )
    parser.add_argument(
        "--eval-prompts",
        type=Path,
        metavar="FILE",
        help='JSON list of {"kind", "text", "chat"}: kept out of training, and evaluated on',
    )
    parser.add_argument("--only", choices=list(STAGES), help="run one stage")
    add_folder("--init", "a head to start from")
    add_folder("--init-draft", "a draft delta to start from")
    parser.add_argument(
        "--wave-size", type=int, default=WAVE_SIZE, metavar="N", help="prompts in a wave"
    )
    add_folder("--waves", "training waves, if not WORK/data")
    add_folder("--eval-waves", "evaluation waves, if not WORK/eval")
    add_folder("--head", "the head to evaluate, if not WORK/eagle")
    add_folder("--draft", "the delta to evaluate, if not WORK/draft-delta")
    options = vars(parser.parse_args(argv))
    only = options.pop("only")
    plan = Plan(**options)
    return plan, [only] if only else _stages_of(plan)


def _stages_of(plan: Plan) -> list[str]:
    judged = plan.eval_prompts or plan.eval_waves
    return [name for name in STAGES if name != "evaluate" or judged]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages; the exit code."""
    plan, names = parse(argv)
    signal.signal(signal.SIGTERM, _interrupt)  # as Ctrl-C: workers are stopped on the way out

    def run() -> None:
        for name in names:
            say(f"== {name}")
            STAGES[name](plan)

    try:
        return exit_code(run)
    except KeyboardInterrupt:
        say("interrupted; the same command goes on from here")
        return INTERRUPTED


def _interrupt(_signum: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
