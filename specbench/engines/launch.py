"""The command line and the environment of one vLLM engine.

Sources: `vllm serve --help` of 0.32; docs/measurement.md for the CPU settings.
"""

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.config import Config
from specbench.engines.installation import Installation

CPU_KV_CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class Launch:
    """Everything that starts one engine, apart from its port and its key."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    notes: tuple[str, ...] = ()


def plan_launch(
    config: Config,
    installation: Installation,
    *,
    model: str,
    speculative_config: Mapping[str, Any] | None,
    engines_together: int = 1,
) -> Launch:
    """The command line and environment for one arm; port, key and served name come later.

    The same for every arm of a config apart from the speculative part, so that a ratio between
    two arms is a ratio between their speculation.
    """
    engine, names = config.engine, installation.names
    args: dict[str, Any] = {
        "enable_prefix_caching": False,  # a second request must cost what the first did
        "generation_config": "vllm",  # the model's own sampling defaults stay out
        "enable_per_request_metrics": True,
    }
    notes: list[str] = []
    env: dict[str, str] = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if installation.is_cpu:
        cpu_args, cpu_env, cpu_notes = _cpu_settings(config, installation)
        args |= cpu_args
        env |= cpu_env
        notes += cpu_notes
    elif engines_together > 1:
        args["gpu_memory_utilization"] = round(0.9 / engines_together, 3)
    if speculative_config is not None:
        args["per_request_spec_decode_metrics"] = "detailed"
    known = {key: value for key, value in args.items() if key in names.engine_args}
    notes += [f"vLLM {names.version} has no {key}" for key in sorted(args.keys() - known.keys())]
    known |= engine.args
    if speculative_config is not None:
        known["speculative_config"] = dict(speculative_config)
    flags = [*_flags(known), *_flags(engine.extra_args)]
    program = [str(installation.python), "-m", "vllm.entrypoints.cli.main", "serve", model]
    return Launch(tuple(program + flags), {**env, **engine.env}, tuple(notes))


def _cpu_settings(
    config: Config, installation: Installation
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """What makes vLLM fast and alike on a CPU (measured: docs/measurement.md).

    One executor process, half of the cores for its threads (the other half is for the client and
    for the other arm's engine), the same for numba's threads that n-gram uses; the OpenMP runtime
    and the allocator that vLLM's documents name, where they are installed.
    """
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    args = {
        "distributed_executor_backend": "uni",
        "max_num_seqs": max(config.concurrency),
        "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES,
    }
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "NUMBA_NUM_THREADS": threads,
        "VLLM_USE_AOT_COMPILE": "0",
    }
    preloads = _preloads(installation)
    if preloads:
        env["LD_PRELOAD"] = ":".join(map(str, preloads))
    names = ", ".join(path.name for path in preloads) or "nothing"
    return args, env, [f"CPU: {threads} thread(s), no AOT compile cache, preloads {names}"]


def _preloads(installation: Installation) -> list[Path]:
    """Intel's OpenMP (the intel-openmp wheel) and tcmalloc, where the machine has them."""
    found = [installation.python.absolute().parents[1] / "lib" / "libiomp5.so"]
    for folder in sorted(Path("/usr/lib").glob("*-linux-gnu")):
        found += [folder / "libtcmalloc_minimal.so.4"]
    return [path for path in found if path.is_file()]


def _flags(args: Mapping[str, Any]) -> Iterator[str]:
    for key, value in args.items():
        flag = "--" + key.lstrip("-").replace("_", "-")
        match value:
            case None:
                continue
            case True:
                yield flag
            case False:
                yield flag.replace("--", "--no-", 1)
            case dict():
                yield from (flag, json.dumps(value))
            case list() | tuple():
                yield from (flag, *map(str, value))
            case _:
                yield from (flag, str(value))


def shell_line(launch: Launch) -> str:
    """The launch as a line for a person to read and paste."""
    sets = [f"{k}={shlex.quote(v)}" for k, v in sorted(launch.env.items())]
    return " ".join([*sets, shlex.join(launch.argv)])
