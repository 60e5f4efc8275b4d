"""Seconds from start to ready for a CPU engine: forked after one import, against started whole.

    python benchmarks/engine_start.py [REPEATS]

Both kinds alternate in the same run; what counts is their ratio.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

from specbench import config, demo
from specbench.engines import vllm
from specbench.engines.installation import require_installation
from specbench.engines.launch import plan_launch

REPEATS = int(sys.argv[1]) if len(sys.argv) > 1 else 3


def main() -> None:
    """Start one engine at a time, each kind in turn."""
    settings = config.load(config.find("demo"))
    installation = require_installation(settings.engine)
    model = demo.resolve(settings.model, say=print)
    launch = plan_launch(
        settings, installation, model=model, speculative_config=None, engines_together=1
    )
    found: dict[str, list[float]] = {"forked": [], "whole": []}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        began = time.monotonic()
        with vllm.prefork_server(launch, installation, folder / "prefork.log") as prefork:
            while not prefork.ready():
                time.sleep(0.05)
            print(f"one import of vLLM: {time.monotonic() - began:.1f} s")
            for repeat in range(REPEATS):
                for kind, server in (("forked", prefork), ("whole", None)):
                    engine = vllm.StartingEngine(
                        launch,
                        installation,
                        arm=kind,
                        start=repeat,
                        folder=folder / f"{kind}{repeat}",
                        startup_timeout_s=600,
                        prefork=server,
                    )
                    with engine:
                        while (facts := engine.poll()) is None:
                            time.sleep(0.05)
                    found[kind].append(facts.startup_s or 0.0)
                    print(f"{kind}: {facts.startup_s:.1f} s")
    forked, whole = (statistics.median(found[kind]) for kind in ("forked", "whole"))
    print(f"median: forked {forked:.1f} s, whole {whole:.1f} s, ratio {whole / forked:.2f}")


if __name__ == "__main__":
    main()
