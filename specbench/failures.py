"""The names of what can go wrong with a case, and what a text gives away of them.

A case's done.json has one of these names as `failure`, beside its status and the reason in words.
The list is closed: `specbench report` counts on it, and so may scripts. docs/failures.md explains it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Failure = Literal[
    "exited_before_ready",
    "not_ready_in_time",
    "not_started",
    "port_taken",
    "wrong_model",
    "not_loaded",
    "out_of_memory",
    "cuda_error",
    "died",
    "engine_core_dead",
    "unreachable",
    "stalled",
    "timed_out",
    "empty_answer",
    "stream_cut",
    "error_in_stream",
    "refused",
    "bad_answer",
    "time_jumped",
    "load_generator_failed",
    "no_baseline",
    "not_measured",
]
FAILURES: tuple[Failure, ...] = get_args(Failure)


def in_words(failure: str) -> str:
    """What a table's cell says."""
    return WORDS.get(failure, failure.replace("_", " "))


def status_text(status: str, failure: str | None) -> str:
    """A case's status with its failure's name in words: "failed: out of memory"."""
    return f"{status}: {in_words(failure)}" if failure else status


WORDS = {"cuda_error": "CUDA error", "no_baseline": "no baseline"}


@dataclass(frozen=True)
class Sign:
    """What gives a failure away: a pattern of a log's line, and what to do about it."""

    failure: Failure
    pattern: re.Pattern[str]
    advice: str | None = None


# What to do when memory is short depends on which share of it was: that is in vLLM's own words.
MORE_CACHE = (
    "Raise engine.args.gpu_memory_utilization, or lower engine.args.max_model_len, so that the KV "
    "cache of one request fits beside the weights."
)
MORE_ROOM = (
    "Lower engine.args.gpu_memory_utilization (or max_model_len, max_num_seqs), so that there is "
    "room beside weights and KV cache."
)
LESS_TAKEN = (
    "Lower engine.args.gpu_memory_utilization, end what else is on the GPU, or write `schedule: "
    "blocks`: one engine at a time."
)
LESS_HOST = (
    "Lower engine.args.kv_cache_memory_bytes or max_model_len, or write `schedule: blocks`: one "
    "engine at a time."
)

# The first sign that is found in a log names the failure: causes stand before what follows from
# them. Wordings as in the sources named; vLLM is 0.32's unless said, PyTorch is 2.x.
SIGNS = (
    # vllm/v1/core/kv_cache_utils.py:_check_enough_kv_cache_memory
    Sign("out_of_memory", re.compile(r"No available memory for the cache blocks"), MORE_CACHE),
    Sign("out_of_memory", re.compile(r"is larger than the available KV cache memory"), MORE_CACHE),
    # vLLM up to 0.8: vllm/worker/worker.py:raise_if_cache_size_invalid
    Sign(
        "out_of_memory",
        re.compile(r"is larger than the maximum number of tokens that can be stored in KV cache"),
        MORE_CACHE,
    ),
    # vllm/v1/worker/utils.py:request_memory; before 0.9 "No GPU memory left": worker.py
    Sign(
        "out_of_memory",
        re.compile(r"Free memory on device .{0,60}on startup is less than"),
        LESS_TAKEN,
    ),
    # vllm/v1/worker/cpu_worker.py:determine_available_memory
    Sign("out_of_memory", re.compile(r"Available memory on node .{0,80}is less than"), LESS_HOST),
    # c10/cuda/CUDACachingAllocator.cpp ("torch.OutOfMemoryError: CUDA out of memory. Tried to
    # allocate …"), and vLLM's gpu_model_runner.py ("CUDA out of memory occurred when warming up")
    Sign("out_of_memory", re.compile(r"(?:CUDA|HIP|XPU) out of memory"), MORE_ROOM),
    # cudaErrorMemoryAllocation by c10/cuda/CUDAException.cpp; NCCL's "Cuda failure 2 'out of memory'"
    Sign("out_of_memory", re.compile(r"CUDA(?: driver)? error: out of memory"), MORE_ROOM),
    Sign("out_of_memory", re.compile(r"Cuda failure .{0,10}'out of memory'"), MORE_ROOM),
    Sign("out_of_memory", re.compile(r"CUBLAS_STATUS_ALLOC_FAILED"), MORE_ROOM),
    # c10/core/impl/alloc_cpu.cpp; CPython; libstdc++; strerror(ENOMEM)
    Sign("out_of_memory", re.compile(r"DefaultCPUAllocator: (?:can't|not enough)"), LESS_HOST),
    Sign("out_of_memory", re.compile(r"^MemoryError\b"), LESS_HOST),
    Sign("out_of_memory", re.compile(r"std::bad_alloc"), LESS_HOST),
    Sign("out_of_memory", re.compile(r"\[Errno 12\] Cannot allocate memory"), LESS_HOST),
    # c10/cuda/CUDAException.cpp ("CUDA error: an illegal memory access was encountered"); ROCm's
    Sign("cuda_error", re.compile(r"(?:CUDA|HIP)(?: driver)? error: ")),
    Sign("cuda_error", re.compile(r"device-side assert triggered")),
    Sign("cuda_error", re.compile(r"\b(?:CUBLAS|CUDNN|CUSPARSE)_STATUS_(?!SUCCESS)[A-Z_]+")),
    # NCCL's ncclResult in torch (NCCLUtils.cpp) and vLLM (pynccl_wrapper.py); Triton the compiler's
    Sign("cuda_error", re.compile(r"NCCL error\b|Triton Error \[CUDA\]")),
    # vllm/csrc/custom_all_reduce.cuh ("Failed: Cuda error FILE:LINE '…'")
    Sign("cuda_error", re.compile(r"Failed: Cuda error|Cuda failure ")),
    Sign(
        "cuda_error", re.compile(r"No CUDA GPUs are available|CUDA driver version is insufficient")
    ),
    # OSError of socket.bind, in asyncio's and in vLLM's own words
    Sign("port_taken", re.compile(r"address already in use", re.IGNORECASE)),
    # vllm/v1/engine/exceptions.py, core.py
    Sign(
        "engine_core_dead",
        re.compile(r"EngineDeadError|EngineCore encountered (?:an issue|a fatal)"),
    ),
)
# vLLM's processes put these before each line: "(EngineCore pid=7) ERROR 09-28 15:47:24 [core.py:7] "
PREFIX = re.compile(
    r"^(?:\(\w+[^()]*\) ?)?(?:(?:ERROR|INFO|WARNING|CRITICAL) \d\d-\d\d [\d:]+ ?(?:\[[^\]]*\] ?)?)?"
)
LONGEST_LINE = 300


def without_prefix(line: str) -> str:
    """A line of a log without its process, level and time."""
    return PREFIX.sub("", line).strip()


@dataclass(frozen=True)
class Cause:
    """What a log gives away: the failure, the line that says so, and what to do."""

    failure: Failure
    line: str
    advice: str | None


def cause_in(log: str) -> Cause | None:
    """The root cause as far as the end of a *log* tells; None where it names none that is known."""
    lines = [without_prefix(line) for line in log.splitlines()]
    for sign in SIGNS:
        for line in reversed(lines):
            if (found := sign.pattern.search(line)) is not None:
                begins = max(0, found.start() - LONGEST_LINE // 2)
                return Cause(sign.failure, line[begins:][:LONGEST_LINE], sign.advice)
    return None


# A failed request by the words of our own clients (load/wire.py, http1.py, sse.py, clocks.py).
# What the server says itself stands behind "HTTP 500:" or "inside the stream:".
OF_REQUESTS: tuple[tuple[Failure, re.Pattern[str]], ...] = (
    (
        "time_jumped",
        re.compile(r"^the (?:machine|wall clock|run) (?:slept|was)|^specbench did not run for"),
    ),
    ("stalled", re.compile(r"^no data for ")),
    ("timed_out", re.compile(r"^no complete answer within ")),
    ("error_in_stream", re.compile(r"^the server sent an error inside the stream")),
    ("empty_answer", re.compile(r"sent no token|says 0 output tokens|the server sent nothing")),
    ("stream_cut", re.compile(r"^the stream was cut")),
    ("refused", re.compile(r"^HTTP \d\d\d")),
    ("unreachable", re.compile(r"^the request failed")),
)

SAID_BY_SERVER = re.compile(r"HTTP 5\d\d|the server sent an error")


def of_request(error: str) -> Failure:
    """The name for a failed request's `error`; what the server names as its cause goes before."""
    if SAID_BY_SERVER.match(error) and (cause := cause_in(error)) is not None:
        return cause.failure
    found = (name for name, pattern in OF_REQUESTS if pattern.search(error))
    return next(found, "bad_answer")


def of_requests(errors: Iterable[str]) -> Failure:
    """The name for what most of *errors* are; not_measured where there is none."""
    counts: dict[Failure, int] = {}
    for error in errors:
        name = of_request(error)
        counts[name] = counts.get(name, 0) + 1
    return max(counts, key=lambda name: counts[name], default="not_measured")


@dataclass(frozen=True)
class Trouble:
    """Why a case stops: the failure's name, and the reason (further lines are the end of a log)."""

    failure: Failure
    problem: str
