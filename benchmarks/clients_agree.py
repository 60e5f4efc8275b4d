"""Do GenAI-Perf and AIPerf measure the speed-up that our own client measures?

    python benchmarks/clients_agree.py [--prompts 6] [--tokens 32] [--rounds 4]

Vanilla and EAGLE k = 2 of the CPU trio stay up together. In each round every client sends the same
prompts to both, clients and arms in random order. Printed: each client's speed-up with its 95%
interval (this set), and its TPOT, TTFT and latency as ratios to the direct client's of the same
prompts, with theirs.
"""

import argparse
import math
import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from specbench import config, prepare
from specbench.analysis.metrics import latency_ms, tpot_ms, ttft_ms
from specbench.analysis.speedup import Key, ratio_of
from specbench.engines import vllm
from specbench.load import perf_analyzer, tools
from specbench.load.base import LoadGenerator, warm_up_prompts
from specbench.load.clients import Clients
from specbench.load.tool_client import Target
from specbench.records import RequestRecord

ARMS = ("vanilla", "eagle-k2")
MEASURES = {"TPOT": tpot_ms, "TTFT": ttft_ms, "latency": latency_ms}
Requests = dict[Key, RequestRecord]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--datasets", type=Path, default=Path("datasets"))
    args = parser.parse_args()
    sets = [
        "speculation=[{method: eagle, model: demo:eagle, k: 2}]",
        f"prompts=[{{set: humaneval, limit: {args.prompts}, seed: 1}}]",
    ]
    path = config.find("demo")
    made = prepare.prepare(
        config.load(path, sets), config_path=path, prompt_folders=(args.datasets,), say=print
    )
    assert made.installation is not None
    assert made.models is not None
    prompts = made.prompt_sets["humaneval"].prompts
    perf_analyzer.fix(say=print)
    measured: dict[tuple[str, str], Requests] = {}
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clients: dict[tuple[str, str], LoadGenerator] = {}
        for arm in ARMS:
            engine = stack.enter_context(
                vllm.StartingEngine(
                    made.launches[arm],
                    made.installation,
                    arm=arm,
                    start=0,
                    folder=work / arm,
                    startup_timeout_s=300,
                )
            )
            while engine.poll() is None:
                time.sleep(0.2)
            server = engine.server
            target = Target(server.url, server.served_model, made.models.target, server.api_key)
            for name in ("direct", *tools.TOOLS):
                tool = tools.require(tools.TOOLS[name], say=print) if name in tools.TOOLS else None
                maker = Clients(
                    made.config.sampling, made.config.load, tool, made.launches[arm].cores
                )
                clients[name, arm] = maker.measuring(target, 0, None, lambda _: None)
            clients["direct", arm].send(
                warm_up_prompts(2), max_tokens=8, concurrency=1, on_record=lambda _: None
            )
        order = random.Random(0)
        for number in range(args.rounds):
            for name, arm in order.sample(list(clients), len(clients)):
                records: list[RequestRecord] = []
                clients[name, arm].send(
                    prompts,
                    max_tokens=args.tokens,
                    concurrency=1,
                    on_record=records.append,
                    folder=work / f"{name}-{arm}",
                )
                found = measured.setdefault((name, arm), {})
                found |= {Key(r.prompt_id, r.turn, 0, number): r for r in records}
    report(measured)


def report(measured: dict[tuple[str, str], Requests]) -> None:
    """The table."""
    print("| client | speed-up | TPOT / direct's | TTFT / direct's | latency / direct's |")
    print("|---|---|---|---|---|")
    for name in dict.fromkeys(client for client, _ in measured):
        cells = [ratio(measured[name, "vanilla"], measured[name, "eagle-k2"], "TPOT")]
        everything = {
            side: {
                Key(f"{arm} {key.prompt_id}", *key[1:]): record
                for arm in ARMS
                for key, record in measured[side, arm].items()
            }
            for side in ("direct", name)
        }
        if name != "direct":
            cells += [ratio(everything[name], everything["direct"], what) for what in MEASURES]
        print(f"| {name} | {' | '.join(cells)} |")


def ratio(above: Requests, below: Requests, what: str) -> str:
    """The geometric mean of *above* / *below*, prompt by prompt, with its interval."""
    measure = MEASURES[what]
    cells = {
        key: math.log(one / other)
        for key in above.keys() & below.keys()
        if (one := measure(above[key])) is not None and (other := measure(below[key])) is not None
    }
    found = ratio_of(cells, {}, set_size=None, seed=0)
    if found is None:
        return "-"
    interval = found.this_set
    return f"{found.value:.3f}" + (
        f" [{interval.low:.3f}, {interval.high:.3f}]" if interval else ""
    )


if __name__ == "__main__":
    main()
