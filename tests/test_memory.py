"""How many engines fit is what their checkpoints and the machine say, or said to be unknown."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from specbench import machine, vllm_names
from specbench.config import Config
from specbench.engines import memory
from specbench.engines.installation import Installation
from specbench.engines.memory import Room, engines_that_fit, room

GIB = 1 << 30
MIB = 1 << 20
LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
GPU = {"uuid": "GPU-aa", "memory.total": "24576 MiB"}
SMALL_GPU = {"uuid": "GPU-bb", "memory.total": "8192 MiB"}


def config(*, env: dict[str, str] | None = None, prefork: bool = True, **args: Any) -> Config:  # noqa: ANN401
    engine = {"args": args, "prefork": prefork, "env": env or {}}
    return Config.model_validate({"model": "m", "prompts": "p", "engine": engine})


def installation(*, cpu: bool) -> Installation:
    return Installation(Path("p"), Path(), vllm_names.recorded(), is_cpu=cpu, lacks_metadata=cpu)


class Tensor(NamedTuple):
    dtype: str
    size: int


def write_safetensors(path: Path, *tensors: Tensor) -> None:
    """A file that is right in its header and its size; its tensors are a hole."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for number, (dtype, size) in enumerate(tensors):
        header[f"t{number}"] = {"dtype": dtype, "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


def checkpoint(folder: Path, size: int, **model: Any) -> str:  # noqa: ANN401
    """A checkpoint of *size* bytes in bfloat16."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **model}), encoding="utf-8")
    write_safetensors(folder / "model.safetensors", Tensor("BF16", size))
    return str(folder)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 20 GiB free, two GPUs, and nothing set in the shell."""
    monkeypatch.setattr(memory, "cpu_bytes", lambda: 20 * GIB)
    monkeypatch.setattr(machine, "facts", lambda: {"gpus": [GPU, SMALL_GPU]})
    for name in ("CUDA_VISIBLE_DEVICES", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)


# --- the sum -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("need", "there", "engines", "reason"),
    [
        (1.6, 18.2, 11, "11 engines of 1.6 GiB fit into 18.2 GiB of memory"),
        (2, 4, 2, "2 engines of 2.0 GiB fit into 4.0 GiB of memory"),
        (3, 4, 1, "one engine of 3.0 GiB fits into 4.0 GiB of memory"),
        (5, 4, 0, "no engine of 5.0 GiB fits into 4.0 GiB of memory"),
    ],
)
def test_room_is_told_with_its_figures(
    need: float, there: float, engines: int, reason: str
) -> None:
    assert room(int(need * GIB), int(there * GIB)) == Room(engines, reason)


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize(
    ("dtype", "prefork", "need"),
    [
        # weights x 1.25 + KV cache + processes
        ("bfloat16", True, 1280 + 512 + 768),
        ("auto", True, 1280 + 512 + 768),
        ("float32", True, 2560 + 512 + 768),
        ("float32", False, 2560 + 512 + 1536),
    ],
)
def test_a_cpu_engine_needs_weights_cache_and_processes(
    tmp_path: Path, dtype: str, prefork: bool, need: int
) -> None:
    target = checkpoint(tmp_path / "target", GIB)
    made = config(dtype=dtype, kv_cache_memory_bytes=512 * MIB, prefork=prefork)
    found = engines_that_fit(made, installation(cpu=True), target=target, drafts=())
    assert found == room(need * MIB, 18 * GIB)
    assert found.engines


@pytest.mark.usefixtures("free")
def test_the_largest_draft_is_in_every_engine(tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "target", GIB)
    drafts = [checkpoint(tmp_path / f"draft{i}", i * 256 * MIB) for i in (1, 2)]
    made = config(kv_cache_memory_bytes="512M")
    found = engines_that_fit(made, installation(cpu=True), target=target, drafts=drafts)
    assert found == room((1280 + 640 + 512 + 768) * MIB, 18 * GIB)


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize(
    ("env", "cache"), [({}, 1024), ({"VLLM_CPU_KVCACHE_SPACE": "4"}, 4096)], ids=["ours", "shell"]
)
def test_a_kv_cache_that_the_config_does_not_set_is_ours_or_the_environments(
    tmp_path: Path, env: dict[str, str], cache: int
) -> None:
    target = checkpoint(tmp_path / "target", GIB)
    found = engines_that_fit(config(env=env), installation(cpu=True), target=target, drafts=())
    assert found == room((1280 + cache + 768) * MIB, 18 * GIB)


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize(
    ("args", "need"),
    [
        # 2 x 32 layers x 8 heads x 128 wide: 128 KiB a token in 16 bits
        ({}, 1024 + 512 + 2048),
        ({"max_model_len": 2048}, 1024 + 256 + 2048),
        ({"max_model_len": "8K"}, 1024 + 1024 + 2048),
        ({"max_model_len": "auto"}, 1024 + 512 + 2048),
        ({"kv_cache_dtype": "fp8"}, 1024 + 256 + 2048),
        ({"dtype": "float32"}, 2048 + 1024 + 2048),
        ({"kv_cache_memory_bytes": GIB}, 1024 + 1024 + 2048),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 256 + 128 + 2048),
    ],
)
def test_a_gpu_engine_needs_at_least_one_request_of_cache(
    tmp_path: Path, args: dict[str, Any], need: int
) -> None:
    target = checkpoint(tmp_path / "target", GIB)
    found = engines_that_fit(config(**args), installation(cpu=False), target=target, drafts=())
    expected = room(need * MIB, int(8 * GIB * 0.9), "GPU memory")
    assert found.engines == expected.engines
    assert found.reason.partition(", with")[0] == expected.reason


LLAMA_3_8B = 8_030_261_248 * 2  # bytes of its weights in 16 bits


@pytest.mark.parametrize(
    ("load", "length", "engines"),
    [
        ({"concurrency": 1}, 8192, 4),  # 15 GiB + 1 + 2
        ({"concurrency": [1, 8]}, 8192, 2),
        ({"rate": 2}, 8192, 2),  # 8 are in flight
        ({"concurrency": 32}, 8192, 1),
        ({"concurrency": 32}, 2048, 2),
        ({"concurrency": 64}, 8192, 0),
    ],
)
def test_an_engine_needs_kv_cache_for_all_requests_in_flight(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    load: dict[str, Any],
    length: int,
    engines: int,
) -> None:
    """Else what is measured at 32 is an engine that preempts, not where speculation stops paying."""
    monkeypatch.setattr(memory, "gpu_bytes", lambda _: 80 * GIB)
    target = checkpoint(tmp_path / "target", LLAMA_3_8B)
    made = config(max_model_len=length).model_copy(update=in_flight(load))
    found = engines_that_fit(made, installation(cpu=False), target=target, drafts=())
    assert found.engines == engines
    many = f"{made.in_flight} requests" if made.in_flight > 1 else "a request"
    assert found.reason.endswith(f" of KV cache for {many} of {length:,} tokens")


def in_flight(load: dict[str, Any]) -> dict[str, Any]:
    """*load* as fields of a config."""
    made = Config.model_validate({"model": "m", "prompts": "p", **load})
    return {name: getattr(made, name) for name in load}


def test_the_layers_of_a_draft_keep_keys_and_values_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "gpu_bytes", lambda _: 80 * GIB)
    target = checkpoint(tmp_path / "target", GIB)
    draft = checkpoint(tmp_path / "draft", MIB, num_hidden_layers=16)
    silent = checkpoint(tmp_path / "medusa", MIB, num_hidden_layers=None)
    gpu, made = installation(cpu=False), config().model_copy(update=in_flight({"concurrency": 8}))
    for drafts, cache in (((), "4.0"), ((silent,), "4.0"), ((draft, silent), "6.0")):
        found = engines_that_fit(made, gpu, target=target, drafts=drafts)
        assert f"with {cache} GiB of KV cache for 8 requests" in found.reason


@pytest.mark.usefixtures("free")
def test_engines_with_kv_cache_for_one_request_are_what_fits_at_least(tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "target", GIB)
    made = config().model_copy(update=in_flight({"concurrency": 32}))
    for cpu, most, least in ((False, 0, 2), (True, 1, 6)):
        both = [
            engines_that_fit(made, installation(cpu=cpu), target=target, drafts=(), requests=count)
            for count in (None, 1)
        ]
        assert [found.engines for found in both] == [most, least], cpu


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize(
    ("concurrency", "together", "gib"),
    [
        (1, 1, 1),  # half a GiB would do
        (2, 4, 1),
        (8, 1, 4),
        (32, 1, 15),  # of 16: nine tenths of 20 GiB, less weights and process
        (32, 2, 6),
        (32, 64, 1),
    ],
)
def test_a_cpu_engines_kv_cache_is_for_all_requests_as_far_as_there_is_memory(
    tmp_path: Path, concurrency: int, together: int, gib: int
) -> None:
    target = checkpoint(tmp_path / "target", GIB * 6 // 5)
    made = config().model_copy(update=in_flight({"concurrency": concurrency}))
    found = memory.cpu_kv_cache_bytes(made, target=target, drafts=(), engines_together=together)
    assert found == gib * GIB


@pytest.mark.usefixtures("free")
def test_the_kv_cache_of_a_model_that_is_not_here_is_our_default(tmp_path: Path) -> None:
    made = config(env={"HF_HUB_CACHE": str(tmp_path)})
    made = made.model_copy(update=in_flight({"concurrency": 32}))
    found = memory.cpu_kv_cache_bytes(made, target="nobody/has", drafts=(), engines_together=1)
    assert found == GIB


@pytest.mark.usefixtures("free")
def test_a_cpu_engine_with_more_kv_cache_leaves_room_for_fewer(tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "target", GIB)
    made = config().model_copy(update=in_flight({"concurrency": 8}))
    found = engines_that_fit(made, installation(cpu=True), target=target, drafts=())
    plain = room((1280 + 4096 + 768) * MIB, 18 * GIB)
    said = ", with 4.0 GiB of KV cache for 8 requests of 4,096 tokens"
    assert found == Room(plain.engines, plain.reason + said)


# --- engines that are too large ------------------------------------------------------------------


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize(
    ("cpu", "size", "args", "said"),
    [
        (True, 9, {}, None),
        (True, 11, {}, "have weights of 22.0 GiB, and this machine has 20.0 GiB of memory free"),
        (
            True,
            6,
            {"dtype": "float32"},
            "have weights of 24.0 GiB, and this machine has 20.0 GiB of memory free",
        ),
        (False, 3, {}, None),
        (False, 5, {}, "have weights of 10.0 GiB, and a GPU here has 8.0 GiB of memory"),
        (False, 5, {"tensor_parallel_size": 2}, None),
        (
            False,
            9,
            {"tensor_parallel_size": 2},
            "have weights of 9.0 GiB on each GPU, and a GPU here has 8.0 GiB of memory",
        ),
    ],
)
def test_engines_whose_weights_alone_are_too_large_are_told(
    tmp_path: Path, cpu: bool, size: int, args: dict[str, Any], said: str | None
) -> None:
    made = config(**args, env={"HF_HUB_CACHE": str(tmp_path / "hub")})
    target = checkpoint(tmp_path / "target", size * GIB)
    drafts = [None, "nobody/has-this"]  # what is not known may be small
    found = memory.too_heavy(made, installation(cpu=cpu), target=target, drafts=drafts)
    assert found == said


@pytest.mark.usefixtures("free")
def test_drafts_have_weights_too(tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "target", 3 * GIB)
    draft = checkpoint(tmp_path / "draft", 2 * GIB)
    gpu = installation(cpu=False)
    found = [
        memory.too_heavy(config(), gpu, target=target, drafts=drafts)
        for drafts in ([None, None], [None, draft], [None, draft, draft])
    ]
    assert found[:2] == [None, None]
    assert "13.0 GiB" in str(found[2])


@pytest.mark.usefixtures("free")
def test_the_configs_share_of_the_gpu_is_what_engines_share(tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "target", GIB)
    made = config(gpu_memory_utilization=0.5, kv_cache_memory_bytes=GIB)
    found = engines_that_fit(made, installation(cpu=False), target=target, drafts=())
    assert found == Room(1, "one engine of 4.0 GiB fits into 4.0 GiB of GPU memory")


# --- what is not known ---------------------------------------------------------------------------


def unknown(found: Room) -> str:
    assert found.engines is None
    return found.reason


@pytest.mark.usefixtures("free")
def test_a_model_that_is_not_here_is_not_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, gone = checkpoint(tmp_path / "target", GIB), "nobody/has-this"
    made = config(env={"HF_HUB_CACHE": str(tmp_path / "hub")})
    cpu = installation(cpu=True)
    for target, drafts in ((gone, [here]), (here, [gone])):
        found = engines_that_fit(made, cpu, target=target, drafts=drafts)
        assert unknown(found) == f"the size of {gone} is not known before it is downloaded"


@pytest.mark.usefixtures("free")
def test_a_model_in_the_hubs_cache_is_measured_there(tmp_path: Path) -> None:
    revision = "0" * 40
    place = tmp_path / "hub" / "models--some--model"
    checkpoint(place / "snapshots" / revision, GIB)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(revision, encoding="utf-8")
    made = config(env={"HF_HUB_CACHE": str(tmp_path / "hub")})
    found = engines_that_fit(made, installation(cpu=True), target="some/model", drafts=())
    assert found == room((1280 + 1024 + 768) * MIB, 18 * GIB)


@pytest.mark.usefixtures("free")
def test_data_parallel_engines_are_not_guessed(tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "target", GIB)
    made = config(data_parallel_size=2)
    for cpu in (True, False):
        found = engines_that_fit(made, installation(cpu=cpu), target=target, drafts=())
        assert "data-parallel" in unknown(found)


@pytest.mark.usefixtures("free")
def test_a_folder_without_weights_or_with_half_of_them_is_not_guessed(tmp_path: Path) -> None:
    cpu = installation(cpu=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    found = engines_that_fit(config(), cpu, target=str(empty), drafts=())
    assert unknown(found) == f"the size of {empty} is not known: it holds no weights"
    half = Path(checkpoint(tmp_path / "half", GIB))
    shards = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (half / "model.safetensors.index.json").write_text(json.dumps(shards), encoding="utf-8")
    found = engines_that_fit(config(), cpu, target=str(half), drafts=())
    assert "model-2.safetensors" in unknown(found)


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 269060552\n",
        b"",
        (9).to_bytes(8, "little") + b"[1, 2, 3]",
        (11).to_bytes(8, "little") + b'{"a": "b"}\n',
    ],
    ids=["LFS pointer", "empty", "a list", "no offsets"],
)
def test_a_file_that_is_no_safetensors_is_not_guessed(tmp_path: Path, content: bytes) -> None:
    target = Path(checkpoint(tmp_path / "target", GIB))
    (target / "model.safetensors").write_bytes(content)
    found = engines_that_fit(config(), installation(cpu=True), target=str(target), drafts=())
    assert "cannot be read" in unknown(found)


@pytest.mark.usefixtures("free")
def test_a_gpu_engine_whose_cache_cannot_be_told_is_not_guessed(tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "target", GIB, num_hidden_layers=None)
    gpu = installation(cpu=False)
    assert "KV cache" in unknown(engines_that_fit(config(), gpu, target=target, drafts=()))
    given = config(kv_cache_memory_bytes=GIB)
    assert engines_that_fit(given, gpu, target=target, drafts=()).engines == 1


# --- weights -------------------------------------------------------------------------------------


def test_weights_take_the_width_that_is_asked_for(tmp_path: Path) -> None:
    tensors = [Tensor("BF16", 2000), Tensor("F32", 4000), Tensor("I8", 300), Tensor("F8_E4M3", 50)]
    write_safetensors(tmp_path / "model.safetensors", *tensors)
    assert memory.weights_bytes(tmp_path, 4) == 4000 + 4000 + 300 + 50
    assert memory.weights_bytes(tmp_path, 2) == 2000 + 2000 + 300 + 50


def test_only_the_shards_of_the_index_count(tmp_path: Path) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors", "other.safetensors"):
        write_safetensors(tmp_path / name, Tensor("F16", 1000))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert memory.weights_bytes(tmp_path, 2) == 2000


def test_copies_in_another_format_do_not_count(tmp_path: Path) -> None:
    for name in ("model.safetensors", "consolidated.safetensors"):
        write_safetensors(tmp_path / name, Tensor("F16", 1000))
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(5000))
    assert memory.weights_bytes(tmp_path, 2) == 1000


@pytest.mark.parametrize(
    ("stored", "width", "size"),
    [("float16", 4, 2000), ("float16", 2, 1000), ("float32", 2, 500), (None, 4, 1000)],
)
def test_a_pickled_checkpoint_is_as_wide_as_its_config_says(
    tmp_path: Path, stored: str | None, width: int, size: int
) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(1000))
    (tmp_path / "training_args.bin").write_bytes(bytes(77))
    model = {"torch_dtype": stored} if stored else {}
    (tmp_path / "config.json").write_text(json.dumps(model), encoding="utf-8")
    assert memory.weights_bytes(tmp_path, width) == size


# --- what there is -------------------------------------------------------------------------------


def control_group(folder: Path, limit: str, used: int, idle: int, *, version: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    (folder / names[0]).write_text(f"{limit}\n", encoding="utf-8")
    (folder / names[1]).write_text(f"{used}\n", encoding="utf-8")
    stat = f"anon 5\n{names[2]} {idle}\nactive_file 9\n"
    (folder / "memory.stat").write_text(stat, encoding="utf-8")


def groups_left(tmp_path: Path, own: str) -> list[int]:
    (tmp_path / "own").write_text(own, encoding="utf-8")
    return memory.control_group_bytes(tmp_path / "root", tmp_path / "own")


def test_a_version_2_group_and_those_above_it_limit(tmp_path: Path) -> None:
    root = tmp_path / "root"
    control_group(root / "a/b", "1000", 400, 100, version=2)
    control_group(root / "a", "2000", 1900, 0, version=2)
    control_group(root / "a/b/c", "max", 50, 0, version=2)
    assert groups_left(tmp_path, "0::/a/b/c\n") == [700, 100]


def test_a_version_1_group_limits(tmp_path: Path) -> None:
    control_group(tmp_path / "root/memory/job", "1000", 400, 100, version=1)
    control_group(tmp_path / "root/cpu/job", "7", 1, 0, version=1)
    assert groups_left(tmp_path, "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n") == [700]


def test_in_a_container_the_group_at_the_top_is_ours(tmp_path: Path) -> None:
    control_group(tmp_path / "root/memory", "1000", 400, 0, version=1)
    assert groups_left(tmp_path, "4:memory:/docker/0123\n") == [600]


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    control_group(tmp_path / "root", "1000", 1400, 100, version=2)
    assert groups_left(tmp_path, "0::/\n") == [0]


def test_a_machine_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert memory.control_group_bytes(tmp_path, tmp_path / "none") == []


def test_the_tighter_of_machine_and_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    available = psutil.virtual_memory().available
    monkeypatch.setattr(memory, "control_group_bytes", lambda: [1 << 60, 12345])
    assert memory.cpu_bytes() == 12345
    monkeypatch.setattr(memory, "control_group_bytes", list)
    assert available / 2 < memory.cpu_bytes() < available * 2


@pytest.mark.parametrize(
    ("chosen", "gib"),
    [(None, 8), ("0", 24), ("1, 0", 8), ("GPU-aa", 24), ("GPU-bb", 8)],
)
def test_the_smallest_gpu_that_engines_see_counts(chosen: str | None, gib: int) -> None:
    assert memory.smallest_gpu([GPU, SMALL_GPU], chosen) == gib * GIB


@pytest.mark.usefixtures("free")
def test_a_gpu_that_only_the_engines_environment_names_is_seen(tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "target", GIB)
    made = config(env={"CUDA_VISIBLE_DEVICES": "0"}, kv_cache_memory_bytes=GIB)
    found = engines_that_fit(made, installation(cpu=False), target=target, drafts=())
    assert found.engines == 5  # 21.6 GiB of 24


@pytest.mark.parametrize(
    ("gpus", "chosen"),
    [([], None), ([GPU], ""), ([GPU], "3"), ([{"uuid": "GPU-c", "memory.total": "[N/A]"}], None)],
)
def test_a_gpu_that_does_not_say_is_not_guessed(
    gpus: list[dict[str, str]], chosen: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "facts", lambda: {"gpus": gpus})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    env = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    target = checkpoint(tmp_path / "target", GIB)
    found = engines_that_fit(config(env=env), installation(cpu=False), target=target, drafts=())
    assert "no GPU" in unknown(found)
