"""The trio's folders: named without building, built once, whole or not at all."""

import hashlib
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from specbench import demo
from specbench.demo import trio
from specbench.errors import ToolError, UserError

TENSORS = b"\x01\x02\x03\x04"


def write_weights(folder: Path, tensors: bytes = TENSORS, note: str = "a") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"__metadata__": {"written_by": note}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + tensors)


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The assemblies that were done, with a cache folder of the test's own."""
    done: list[str] = []

    def assemble(folder: Path, arguments: Sequence[str]) -> None:
        time.sleep(0.1)
        done.append(arguments[0])
        write_weights(folder)

    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(trio, "TARGET_SHA256", hashlib.sha256(TENSORS).hexdigest())
    monkeypatch.setattr("specbench.fetch.fetch_member", lambda *_, **__: tmp_path / "x.gguf")
    monkeypatch.setattr(trio, "_assemble", assemble)
    return done


def test_a_model_that_is_no_member_is_left_as_it_is() -> None:
    assert demo.resolve("meta-llama/Llama-3.1-8B-Instruct") == "meta-llama/Llama-3.1-8B-Instruct"


def test_an_unknown_member_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean demo:eagle"):
        demo.resolve("demo:eagel")


def test_the_head_ships_with_its_weights() -> None:
    folder = Path(demo.resolve("demo:eagle"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["num_hidden_layers"] == 1
    assert (folder / "model.safetensors").stat().st_size > 8_000_000


def test_the_shipped_weights_stay_under_25_mb() -> None:
    assert sum(path.stat().st_size for path in demo.WEIGHTS.rglob("*.safetensors")) < 25e6


def test_the_target_is_assembled_once(built: list[str]) -> None:
    first = demo.resolve("demo:target")
    assert demo.resolve("demo:target") == first
    assert built == ["target"]


def test_of_two_at_once_one_assembles_and_both_get_it(built: list[str]) -> None:
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(demo.resolve("demo:draft"))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == ["target", "draft"]
    assert len(set(found)) == 1


def test_a_target_with_other_weights_is_assembled_again(built: list[str]) -> None:
    folder = Path(demo.resolve("demo:target"))
    write_weights(folder, b"bits that rotted")
    demo.resolve("demo:target")
    assert built == ["target", "target"]


def test_an_assembly_with_other_weights_than_it_should_is_refused_and_removed(
    built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trio, "TARGET_SHA256", "0" * 64)
    with pytest.raises(ToolError, match="other weights than it should"):
        demo.resolve("demo:target")
    assert not trio.target_folder().exists()


def test_a_dry_run_names_the_folder_and_builds_nothing(built: list[str]) -> None:
    named = demo.resolve("demo:target", build=False)
    assert not Path(named).exists()
    assert built == []
    assert demo.resolve("demo:target") == named


def test_the_hash_is_of_the_tensors_and_not_of_who_wrote_them(tmp_path: Path) -> None:
    write_weights(tmp_path / "one", note="transformers 5")
    write_weights(tmp_path / "two", note="transformers 6, with a longer header")
    hashes = {trio.tensors_sha256(tmp_path / n / "model.safetensors") for n in ("one", "two")}
    assert hashes == {hashlib.sha256(TENSORS).hexdigest()}


@pytest.mark.engine
def test_an_assembly_that_fails_says_what_it_needs_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    folder = tmp_path / "demo" / "x"
    folder.parent.mkdir()
    with pytest.raises(ToolError, match="install specbench\\[demo\\]"):
        trio._assemble(folder, ["draft", "nowhere", "nothing"])
    assert list(folder.parent.iterdir()) == []
