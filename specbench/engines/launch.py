"""The command line and the environment of one vLLM engine.

Sources: `vllm serve --help` of 0.32; docs/cpu.md for the CPU settings.
"""

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbench.config import Config, Engine
from specbench.engines.installation import Installation
from specbench.environment import SECRET, WITHHELD
from specbench.errors import UserError

CPU_KV_CACHE_BYTES = 1 << 30  # at least; more for many requests in flight (engines/memory.py)
GPU_MEMORY_SHARE = 0.9  # of a GPU, for all engines on it together; vLLM's own default is near it


# Of `vllm serve` only; AsyncEngineArgs has no such fields.
FRONT_END_ARGS = {"enable_per_request_metrics", "per_request_spec_decode_metrics"}


@dataclass(frozen=True)
class Launch:
    """Everything that starts one engine, apart from its port and its key.

    `cores` are those that it is to compute on once it is up (`bind`); empty: any. `model_json` is
    the same engine as fields of vLLM's AsyncEngineArgs, which Triton's vLLM backend reads.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    notes: tuple[str, ...] = ()
    cores: frozenset[int] = frozenset()
    model_json: Mapping[str, Any] = field(default_factory=dict)


def plan_launch(
    config: Config,
    installation: Installation,
    *,
    model: str,
    speculative_config: Mapping[str, Any] | None,
    engines_together: int,
    cpu_kv_cache_bytes: int = CPU_KV_CACHE_BYTES,
) -> Launch:
    """The command line and environment for one arm; port, key and served name come later.

    The same for every arm of a config apart from the speculative part, so that a ratio between
    two arms is a ratio between their speculation. *engines_together* share the machine: up at the
    same time, one of them at work. On a CPU each worker has *cpu_kv_cache_bytes* where the config
    names no KV cache (memory.cpu_kv_cache_bytes); on a GPU it is what an engine's share leaves.
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
        cpu_args, cpu_env, cpu_notes = _cpu_settings(config, installation, cpu_kv_cache_bytes)
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
    cores = engine_cores() if installation.is_cpu and not _places_threads(engine) else frozenset()
    more = {key.lstrip("-").replace("-", "_"): value for key, value in engine.extra_args.items()}
    fields = {key: value for key, value in known.items() if key not in FRONT_END_ARGS}
    return Launch(
        tuple(program + flags),
        {**env, **engine.env},
        tuple(notes),
        cores,
        {"model": model, **fields, **more},
    )


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
    config: Config, installation: Installation, kv_cache_bytes: int
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """What makes vLLM fast and alike on a CPU (measured: docs/cpu.md).

    One executor process, half of the cores for its threads, the same for numba's threads that
    n-gram uses; the OpenMP runtime and the allocator that vLLM's documents name, where they are
    installed.

    An engine that waits leaves the cores alone: Intel's runtime would spin for 200 ms after each
    answer, into the next arm's turn. Left to itself it also puts each forked process on core 0, the
    API server too; where threads run is up to `bind`. (vLLM's own VLLM_CPU_OMP_THREADS_BIND is read
    by its multi-process executor only.)
    """
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    args = {
        "distributed_executor_backend": "uni",
        "max_num_seqs": config.in_flight,
        "kv_cache_memory_bytes": kv_cache_bytes,
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
    idle = "which sleep 1 ms after their work"
    return args, env, [f"CPU: {threads} thread(s), {idle}; no AOT compile cache, preloads {names}"]


def _preloads(installation: Installation) -> list[Path]:
    """Intel's OpenMP (the intel-openmp wheel) and tcmalloc, where the machine has them."""
    found = [installation.python.absolute().parents[1] / "lib" / "libiomp5.so"]
    for folder in sorted(Path("/usr/lib").glob("*-linux-gnu")):
        found += [folder / "libtcmalloc_minimal.so.4"]
    return [path for path in found if path.is_file()]


def _places_threads(engine: Engine) -> bool:
    """Whether the config itself says how many threads run where."""
    own = ("OMP_", "KMP_", "GOMP_", "VLLM_CPU_OMP_")
    keys = ("distributed_executor_backend", "tensor_parallel_size", "pipeline_parallel_size")
    return any(name.startswith(own) for name in engine.env) or any(k in engine.args for k in keys)


def engine_cores(topology: Path = Path("/sys/devices/system/cpu")) -> frozenset[int]:
    """Half of the cores that we may use, for engines to compute on: one a physical core first.

    The same for all engines, of which one is at work at a time; the other half is for their API
    servers and the client. Empty where there is one core.
    """
    ours = sorted(os.sched_getaffinity(0))

    def place(core: int) -> tuple[int, int]:
        try:
            file = topology / f"cpu{core}" / "topology" / "thread_siblings_list"
            siblings = _id_list(file.read_text(encoding="utf-8"))
            return [i for i in siblings if i in ours].index(core), core
        except (OSError, ValueError):
            return 0, core

    return frozenset(sorted(ours, key=place)[: len(ours) // 2])


def _id_list(text: str) -> list[int]:
    """What the kernel's "0-2,8" means: 0, 1, 2, 8."""
    ends = [part.partition("-") for part in text.strip().split(",")]
    return [i for first, _, last in ends for i in range(int(first), int(last or first) + 1)]


def bind(launch: Launch, pids: Sequence[int]) -> tuple[str, ...]:
    """Put an engine that is up on its cores and its API server on the others; notes that say so.

    *pids* are the API server and all that it started. What they start later stays there as well.
    """
    if not launch.cores:
        return ()
    others = os.sched_getaffinity(0) - launch.cores
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*"):
            with suppress(OSError):  # it has ended
                os.sched_setaffinity(int(task.name), others if pid == pids[0] else launch.cores)
    engine, server = (",".join(map(str, sorted(cores))) for cores in (launch.cores, others))
    return (f"CPU: the engine computes on core(s) {engine}; its API server is on {server}",)


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
    """The launch as a line for a person to read and paste; secrets are to be filled in."""
    shown = {k: WITHHELD if SECRET.search(k) else v for k, v in launch.env.items()}
    sets = [f"{k}={shlex.quote(v)}" for k, v in sorted(shown.items())]
    return " ".join([*sets, shlex.join(launch.argv)])
