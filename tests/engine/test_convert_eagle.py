"""EAGLE heads go into the layout of vLLM before 0.7.3 and come back as they were."""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specbench import demo
from specbench.cli import app
from specbench.errors import StoreError, UserError
from specbench.models import checkpoint, eagle

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.engine  # not for an engine, but for torch, whose import takes a second

VOCABULARY, HIDDEN = 64, 576  # a small vocabulary: the demo's own has 49152
LM_HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
Tensors = dict[str, Any]


@pytest.fixture(scope="module")
def head() -> Tensors:
    """The demo's head as it is shipped: nine tensors, no embedding and no lm_head."""
    tensors, _ = checkpoint.read_tensors(demo.WEIGHTS / "eagle")
    return tensors


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return {**checkpoint.read_config(demo.WEIGHTS / "eagle"), "vocab_size": VOCABULARY}


def put(folder: Path, config: Mapping[str, Any], tensors: Tensors, *, form: str = "one") -> Path:
    """A checkpoint in one safetensors file, in shards with an index, or pickled."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if form == "one":
        safetensors.save_file(tensors, folder / "model.safetensors")
    elif form == "pickled":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        where = {name: f"model-{i % 3}-of-3.safetensors" for i, name in enumerate(sorted(tensors))}
        for file in set(where.values()):
            part = {name: tensors[name] for name in tensors if where[name] == file}
            safetensors.save_file(part, folder / file)
        index = {"weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A target with an embedding and an lm_head, in shards."""
    return put(tmp_path / "target", {"model_type": "llama"}, target_tensors(), form="shards")


def target_tensors() -> Tensors:
    draw = torch.Generator().manual_seed(1)
    shape = (VOCABULARY, HIDDEN)
    return {
        LM_HEAD: torch.randn(shape, generator=draw),
        f"model.{EMBEDDING}": torch.randn(shape, generator=draw),
        "model.norm.weight": torch.ones(HIDDEN),
    }


def own_embedding() -> Tensors:
    return {EMBEDDING: torch.full((VOCABULARY, HIDDEN), 0.5, dtype=torch.bfloat16)}


def own_lm_head() -> Tensors:
    return {LM_HEAD: torch.full((VOCABULARY, HIDDEN), 0.25, dtype=torch.bfloat16)}


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def read(folder: Path) -> Tensors:
    tensors, _ = checkpoint.read_tensors(folder)
    return tensors


@pytest.mark.parametrize("form", ["one", "pickled", "shards"])
@pytest.mark.parametrize("own", [dict, own_embedding, lambda: own_embedding() | own_lm_head()])
def test_there_and_back_again_nothing_has_changed(
    tmp_path: Path,
    head: Tensors,
    config: dict[str, Any],
    target: Path,
    form: str,
    own: Any,  # noqa: ANN401  (pytest's parameter)
) -> None:
    """With and without embedding and lm_head, from every kind of file."""
    tensors = {**head, **own()}
    source = put(tmp_path / "head", config, tensors, form=form)
    eagle.convert(source, tmp_path / "old", "vllm-0.7", target=target)
    eagle.convert(tmp_path / "old", tmp_path / "back", "eagle")
    assert same(read(tmp_path / "back"), tensors)
    assert checkpoint.read_config(tmp_path / "back") == config


def test_the_old_layout_is_what_the_loader_of_vllm_0_7_takes(
    tmp_path: Path, head: Tensors, config: dict[str, Any], target: Path
) -> None:
    """Its load_weights wants lm_head.weight, an embedding, and its own kind of config."""
    source = put(tmp_path / "head", config, head)
    done = eagle.convert(source, tmp_path / "old", "vllm-0.7", target=target)
    found = read(tmp_path / "old")
    assert set(found) == {*head, LM_HEAD, EMBEDDING}
    theirs = target_tensors()
    assert torch.equal(found[LM_HEAD], theirs[LM_HEAD].to(torch.bfloat16))
    assert torch.equal(found[EMBEDDING], theirs[f"model.{EMBEDDING}"].to(torch.bfloat16))
    said = checkpoint.read_config(tmp_path / "old")
    assert said["model_type"] == "eagle"
    assert said["model"]["architectures"] == ["LlamaForCausalLM"]
    # What Transformers 5 calls rope_parameters and dtype; 4 would take 10000 as theta.
    assert said["model"]["rope_theta"] == 100000.0
    assert said["model"]["torch_dtype"] == "bfloat16"
    assert done.notes == ("embed_tokens.weight is the target's", "lm_head.weight is the target's")


def test_a_heads_own_embedding_and_lm_head_are_kept(
    tmp_path: Path, head: Tensors, config: dict[str, Any]
) -> None:
    tensors = {**head, **own_embedding(), **own_lm_head()}
    source = put(tmp_path / "head", config, tensors)
    eagle.convert(source, tmp_path / "old", "vllm-0.7")  # no target is needed
    assert same(read(tmp_path / "old"), tensors)


def test_a_tied_target_gives_its_embedding_as_lm_head(
    tmp_path: Path, head: Tensors, config: dict[str, Any]
) -> None:
    theirs = {f"model.{EMBEDDING}": target_tensors()[f"model.{EMBEDDING}"]}
    tied = put(tmp_path / "tied", {"tie_word_embeddings": True}, theirs)
    source = put(tmp_path / "head", config, head)
    eagle.convert(source, tmp_path / "old", "vllm-0.7", target=tied)
    found = read(tmp_path / "old")
    assert torch.equal(found[LM_HEAD], found[EMBEDDING])


@pytest.mark.parametrize("prefix", ["", "model.", "model.model."])
def test_heads_that_others_converted_come_back_whatever_their_prefix(
    tmp_path: Path, head: Tensors, config: dict[str, Any], prefix: str
) -> None:
    names = {name: name if name.startswith("fc.") else f"{prefix}{name}" for name in head}
    tensors = {names[name]: tensor for name, tensor in head.items()} | own_lm_head()
    wrapped = {"model_type": "eagle", "model": config}
    source = put(tmp_path / "old", wrapped, tensors)
    done = eagle.convert(source, tmp_path / "new", "current")
    assert same(read(tmp_path / "new"), head)
    assert checkpoint.read_config(tmp_path / "new") == config
    assert done.notes == ("lm_head.weight is left out: it is the target's",)


def test_for_the_eagle_repository_the_weights_are_pickled_as_it_reads_them(
    tmp_path: Path, head: Tensors, config: dict[str, Any]
) -> None:
    source = put(tmp_path / "head", config, head)
    eagle.convert(source, tmp_path / "repo", "eagle")
    found = torch.load(tmp_path / "repo" / "pytorch_model.bin", weights_only=True)
    assert same(found, head)
    assert not (tmp_path / "repo" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("form", "to"), [("one", "current"), ("pickled", "current"), ("pickled", "eagle")]
)
def test_where_no_conversion_is_needed_it_says_so_and_writes_nothing(
    tmp_path: Path, head: Tensors, config: dict[str, Any], form: str, to: eagle.Layout
) -> None:
    source = put(tmp_path / "head", config, head, form=form)
    done = eagle.convert(source, tmp_path / "out", to)
    assert done.written is None
    assert "as it is" in done.reason or "in the EAGLE repository's layout" in done.reason
    assert not (tmp_path / "out").exists()


def test_a_converted_head_needs_no_second_conversion(
    tmp_path: Path, head: Tensors, config: dict[str, Any], target: Path
) -> None:
    source = put(tmp_path / "head", config, head)
    eagle.convert(source, tmp_path / "old", "vllm-0.7", target=target)
    again = eagle.convert(tmp_path / "old", tmp_path / "older", "vllm-0.7")
    assert (again.written, again.reason) == (None, "vLLM before 0.7.3 loads it as it is.")


def test_an_lm_head_that_todays_vllm_refuses_is_taken_out(
    tmp_path: Path, head: Tensors, config: dict[str, Any]
) -> None:
    source = put(tmp_path / "head", config, {**head, **own_lm_head()})
    done = eagle.convert(source, tmp_path / "new", "current")
    assert done.written is not None
    assert same(read(tmp_path / "new"), head)
    own = {**head, **own_lm_head(), **own_embedding()}
    eagle.convert(put(tmp_path / "own", config, own), tmp_path / "old", "vllm-0.7")
    eagle.convert(tmp_path / "old", tmp_path / "back", "current")
    assert same(read(tmp_path / "back"), {**head, **own_embedding()})


def test_tensors_that_share_their_memory_in_a_pickle_are_written_apart(
    tmp_path: Path, head: Tensors, config: dict[str, Any]
) -> None:
    tied = own_embedding()[EMBEDDING]
    wide = torch.zeros(HIDDEN, 4 * HIDDEN, dtype=torch.bfloat16)
    tensors = {**head, EMBEDDING: tied, LM_HEAD: tied, "fc.weight": wide[:, : 2 * HIDDEN]}
    source = put(tmp_path / "head", config, tensors, form="pickled")
    eagle.convert(source, tmp_path / "old", "vllm-0.7")
    assert same(read(tmp_path / "old"), tensors)


def test_a_bias_of_fc_is_said_in_the_config_that_asks_for_it(
    tmp_path: Path, head: Tensors, config: dict[str, Any], target: Path
) -> None:
    tensors = {**head, "fc.bias": torch.zeros(HIDDEN)}
    source = put(tmp_path / "head", config, tensors)
    eagle.convert(source, tmp_path / "old", "vllm-0.7", target=target)
    assert checkpoint.read_config(tmp_path / "old")["model"]["eagle_fc_bias"] is True
    back = eagle.convert(tmp_path / "old", tmp_path / "new", "current")
    assert any("no bias in fc" in note for note in back.notes)
    assert "eagle_fc_bias" not in checkpoint.read_config(tmp_path / "new")


# --- what is refused -----------------------------------------------------------------------------


class Evil:
    """A pickle that would touch a file when it is loaded."""

    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.touched,))


def test_a_pickle_that_would_run_code_is_not_loaded(
    tmp_path: Path, config: dict[str, Any], target: Path
) -> None:
    source = tmp_path / "head"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    torch.save({"fc.weight": Evil(tmp_path / "touched")}, source / "pytorch_model.bin")
    with pytest.raises(UserError, match="could run code: not loaded"):
        eagle.convert(source, tmp_path / "out", "vllm-0.7", target=target)
    assert not (tmp_path / "touched").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (pickle.dumps([1, 2]), "pytorch_model.bin"),
        (b"", "pytorch_model.bin"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_named(
    tmp_path: Path, config: dict[str, Any], content: bytes, words: str
) -> None:
    source = tmp_path / "head"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (source / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(UserError, match=words):
        eagle.convert(source, tmp_path / "out", "vllm-0.7")


def test_what_the_head_lacks_has_to_come_from_a_target(
    tmp_path: Path, head: Tensors, config: dict[str, Any], target: Path
) -> None:
    source = put(tmp_path / "head", config, head)
    with pytest.raises(
        UserError, match=r"no embed_tokens\.weight and no lm_head\.weight.*--target"
    ):
        eagle.convert(source, tmp_path / "out", "vllm-0.7")
    small = {name: tensor[..., :8] for name, tensor in target_tensors().items()}
    other = put(tmp_path / "other", {}, {name: t.contiguous() for name, t in small.items()})
    with pytest.raises(UserError, match="hidden size 576"):
        eagle.convert(source, tmp_path / "out", "vllm-0.7", target=other)
    (target / "model-1-of-3.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-1-of-3\.safetensors is missing"):
        eagle.convert(source, tmp_path / "out", "vllm-0.7", target=target)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"midlayer.hidden_norm.weight": 1}, "EAGLE-3 head"),
        ({"token_map": 1}, "part of the vocabulary"),
        ({"model.fc.weight": 1}, "twice"),
    ],
)
def test_heads_that_no_other_layout_holds_are_refused(
    tmp_path: Path, head: Tensors, config: dict[str, Any], extra: dict[str, int], words: str
) -> None:
    more = {name: torch.zeros(1) for name in extra}
    source = put(tmp_path / "head", config, {**head, **more})
    with pytest.raises(UserError, match=words):
        eagle.convert(source, tmp_path / "out", "vllm-0.7")


def test_a_folder_of_something_else_is_no_head(tmp_path: Path, target: Path) -> None:
    with pytest.raises(UserError, match="is no EAGLE head"):
        eagle.convert(target, tmp_path / "out", "vllm-0.7")
    with pytest.raises(UserError, match=r"config\.json is missing"):
        eagle.convert(tmp_path / "nowhere", tmp_path / "out", "vllm-0.7")


def test_a_folder_that_is_there_is_never_written_over(
    tmp_path: Path, head: Tensors, config: dict[str, Any], target: Path
) -> None:
    source = put(tmp_path / "head", config, head)
    with pytest.raises(UserError, match="is there already"):
        eagle.convert(source, target, "vllm-0.7", target=target)
    with pytest.raises(UserError, match="is there already"):
        eagle.convert(source, source, "vllm-0.7", target=target)


def test_a_full_disk_leaves_nothing_half_written(
    tmp_path: Path,
    head: Tensors,
    config: dict[str, Any],
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = put(tmp_path / "head", config, head)

    def full(*_: Any, **__: Any) -> None:  # noqa: ANN401
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(StoreError, match="No space left"):
        eagle.convert(source, tmp_path / "out", "vllm-0.7", target=target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head", "target"]


# --- the command ---------------------------------------------------------------------------------


def test_the_command_converts_and_says_what_it_did(
    tmp_path: Path, head: Tensors, config: dict[str, Any], target: Path
) -> None:
    source = put(tmp_path / "head", config, head)
    args = ["models", "convert-eagle", str(source), str(tmp_path / "old"), "--target", str(target)]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    assert "11 tensors, for vLLM before 0.7.3" in done.stdout
    assert "lm_head.weight is the target's" in done.stderr
    none = CliRunner().invoke(app, [*args[:3], str(tmp_path / "x"), "--to", "current"])
    assert "no conversion needed" in none.stdout
    wrong = CliRunner().invoke(app, [*args, "--to", "vllm-0.6"])
    assert isinstance(wrong.exception, UserError)
