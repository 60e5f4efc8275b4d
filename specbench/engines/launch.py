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

from specbench.config import Config, Engine
from specbench.engines.installation import Installation
from specbench.errors import UserError

CPU_KV_CACHE_BYTES = 1 << 30
GPU_MEMORY_SHARE = 0.9  # of a GPU, for all engines on it together; vLLM's own default is near it


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
    engines_together: int,
) -> Launch:
    """The command line and environment for one arm; port, key and served name come later.

    The same for every arm of a config apart from the speculative part, so that a ratio between
    two arms is a ratio between their speculation. *engines_together* share the machine: up at the
    same time, one of them at work.
    """
    engine, names = config.engine, installation.names
    given = dict(engine.args)
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
        total = gpu_memory_total(engine)
        # Rounded down, so that all of them fit; the config's own value is what they share.
        share = int(total * 10_000 / engines_together + 1e-6) / 10_000
        given |= {"gpu_memory_utilization": share}
        notes.append(f"GPU: {share:g} of its memory; {engines_together} engines share {total:g}")
    if speculative_config is not None:
        args["per_request_spec_decode_metrics"] = "detailed"
    known = {key: value for key, value in args.items() if key in names.engine_args}
    notes += [f"vLLM {names.version} has no {key}" for key in sorted(args.keys() - known.keys())]
    known |= given
    if speculative_config is not None:
        known["speculative_config"] = dict(speculative_config)
    flags = [*_flags(known), *_flags(engine.extra_args)]
    program = [str(installation.python), "-m", "vllm.entrypoints.cli.main", "serve", model]
    return Launch(tuple(program + flags), {**env, **engine.env}, tuple(notes))


def gpu_memory_total(engine: Engine) -> float:
    """The share of a GPU that all engines on it together may have.

    Raises:
        UserError: the config asks for one that is none.
    """
    total = engine.args.get("gpu_memory_utilization", GPU_MEMORY_SHARE)
    if isinstance(total, bool) or not isinstance(total, int | float) or not 0 < total <= 1:
        raise UserError(
            f"engine.args.gpu_memory_utilization is {total!r}.",
            hint="Write a number above 0, at most 1: the share for all engines together.",
        )
    return float(total)


def _cpu_settings(
    config: Config, installation: Installation
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """What makes vLLM fast and alike on a CPU (measured: docs/measurement.md).

    One executor process, half of the cores for its threads (the other half is for its API server
    and the client), the same for numba's threads that n-gram uses; the OpenMP runtime and the
    allocator that vLLM's documents name, where they are installed.

    Engines that are up together have the same cores, all that we may use, and an engine that waits
    leaves them alone: Intel's runtime would bind a forked process to core 0, with its API server,
    and spin for 200 ms after each answer, into the next arm's turn. (vLLM's own binding,
    VLLM_CPU_OMP_THREADS_BIND, is read by its multi-process executor only.)
    """
    cores = len(os.sched_getaffinity(0))
    threads = str(max(1, cores // 2))
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
        "KMP_AFFINITY": "none",
        "KMP_BLOCKTIME": "1",  # ms; 0 sleeps within a step as well, which costs more
        "VLLM_USE_AOT_COMPILE": "0",
    }
    preloads = _preloads(installation)
    if preloads:
        env["LD_PRELOAD"] = ":".join(map(str, preloads))
    names = ", ".join(path.name for path in preloads) or "nothing"
    where = f"{threads} thread(s) on any of {cores} cores, idle ones sleep after 1 ms"
    return args, env, [f"CPU: {where}, no AOT compile cache, preloads {names}"]


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
