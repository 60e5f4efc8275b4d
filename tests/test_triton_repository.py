"""A config becomes a model repository that the vLLM of the asked-for container would load."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from specbench import config as configs
from specbench.cli import app
from specbench.config import Config
from specbench.errors import ConfigError, StoreError, UserError
from specbench.sweep import arms_of
from specbench.triton import check, pbtxt, versions, writing
from specbench.triton.places import Places
from specbench.triton.repository import Repository, model_names, plan_repository

TEXT = """\
model: org/target
speculation:
  - {method: eagle, model: org/EAGLE-head, k: [3, 5]}
  - {method: draft_model, model: org/draft, k: 3}
  - {method: ngram, k: 3, prompt_lookup_max: 4}
prompts: p
engine: {args: {dtype: bfloat16, max_model_len: 2048}}
"""
OLD, NEWEST = "25.02", versions.newest()


def parsed(tmp_path: Path, text: str = TEXT) -> Config:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return configs.load(path)


def planned(config: Config, triton: str = NEWEST, **more: Any) -> Repository:  # noqa: ANN401
    takes = versions.container(triton).takes
    return plan_repository(config, arms_of(config), takes, config_path="c.yaml", **more)


def arguments(repository: Repository) -> Mapping[str, Mapping[str, Any]]:
    return {model.name: model.arguments for model in repository.models}


def put(repository: Repository, folder: Path, *, force: bool = False) -> None:
    about = {"config_path": "c.yaml", "triton": NEWEST, "vllm": "1"}
    writing.write(repository, folder, force=force, **about)


# --- the table of containers ---------------------------------------------------------------------


def test_the_table_of_containers_says_where_it_is_from_and_goes_upwards() -> None:
    table = versions._data("containers.json")
    assert "compatibility.md at " in table["source"]
    shown = list(versions.container_versions())
    assert shown == sorted(shown)
    releases = [versions.release(vllm) for vllm in versions.container_versions().values()]
    assert releases == sorted(releases)
    assert versions.container_versions()[OLD].startswith("0.7.0+")
    assert versions.release("0.9.0rc1+1958ee56.nv25.6.cu129") == (0, 9, 0)


def test_speculation_is_flat_up_to_the_container_with_vllm_0_8_1() -> None:
    """25.04 holds vLLM 0.8.1, which still wants the flat keys: the change came in 0.8.2."""
    flat = [c for c in versions.container_versions() if versions.container(c).takes.is_flat]
    assert flat[-1] == "25.04"
    assert flat == list(versions.container_versions())[: len(flat)]


@pytest.mark.parametrize("triton", list(versions.container_versions()))
def test_every_container_knows_what_every_model_needs(triton: str) -> None:
    takes = versions.container(triton).takes
    assert {"model", "dtype", "max_model_len", "enable_prefix_caching"} <= takes.engine_args
    assert {"eagle", "ngram"} <= takes.methods
    assert takes.is_flat == ("num_speculative_tokens" not in takes.speculation_keys)


def test_a_container_that_is_not_in_the_table_is_refused_with_those_that_are() -> None:
    with pytest.raises(UserError, match=rf"24\.10 to {NEWEST}"):
        versions.container("23.01")


def test_the_documents_table_says_of_every_container_what_the_code_does() -> None:
    text = (Path(__file__).parents[1] / "docs" / "triton.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if "| 0." in line]
    for triton in versions.container_versions():
        takes = versions.container(triton).takes
        (row,) = [row for row in rows if covers(row[0], triton)]
        assert ("flat" in row[2]) == takes.is_flat
        assert ("convert" in row[3]) == (not takes.loads_eagle_repo_heads)
        assert ("its path" in row[3]) == takes.tells_eagle_by_its_path
        assert ("no draft models" in row[2]) == ("draft_model" not in takes.methods)
    assert f"tritonserver:{NEWEST}-vllm" in text


def covers(said: str, triton: str) -> bool:
    """Whether "24.10 to 24.12", "from 26.02" or "25.01" means *triton*."""
    first, _, last = said.removeprefix("from ").partition(" to ")
    return first <= triton <= (last or ("99.99" if said.startswith("from ") else first))


# --- what model.json says ------------------------------------------------------------------------


def test_each_arm_is_a_model_and_several_k_are_several_models(tmp_path: Path) -> None:
    names = [model.name for model in planned(parsed(tmp_path)).models]
    assert names == ["base_model", "eagle_model_k3", "eagle_model_k5", "draft_model", "ngram_model"]


def test_a_current_container_gets_speculative_config(tmp_path: Path) -> None:
    found = arguments(planned(parsed(tmp_path)))
    assert found["base_model"] == {
        "model": "org/target",
        "enable_prefix_caching": False,
        "generation_config": "vllm",
        "dtype": "bfloat16",
        "max_model_len": 2048,
    }
    assert found["eagle_model_k3"] == {
        **found["base_model"],
        "speculative_config": {
            "method": "eagle",
            "model": "org/EAGLE-head",
            "num_speculative_tokens": 3,
        },
    }


def test_25_02_gets_the_flat_keys_and_no_others(tmp_path: Path) -> None:
    found = arguments(planned(parsed(tmp_path), OLD))
    base = found["base_model"]
    assert "generation_config" not in base  # in vLLM 0.7.0 "vllm" would be a folder's name
    assert found["eagle_model_k5"] == {
        **base,
        "speculative_model": "org/EAGLE-head",
        "num_speculative_tokens": 5,
        "speculative_draft_tensor_parallel_size": 1,
    }
    assert found["draft_model"] == {
        **base,
        "speculative_model": "org/draft",
        "num_speculative_tokens": 3,
    }
    assert found["ngram_model"] == {
        **base,
        "speculative_model": "[ngram]",
        "num_speculative_tokens": 3,
        "ngram_prompt_lookup_max": 4,
    }


@pytest.mark.parametrize("triton", list(versions.container_versions()))
def test_what_is_written_for_a_container_is_all_known_to_its_vllm(
    tmp_path: Path, triton: str
) -> None:
    """The checker is the judge; draft_model is left out where that vLLM has none."""
    config = parsed(tmp_path)
    takes = versions.container(triton).takes
    arms = [arm for arm in arms_of(config) if arm.method in {*takes.methods, "vanilla"}]
    made = plan_repository(config, arms, takes, config_path="c.yaml")
    put(made, tmp_path / "repo")
    found = check.check(tmp_path / "repo", takes, Places({}))
    assert [f.as_line() for f in found.findings if f.level == "problem"] == []
    assert len(found.models) == len(arms)
    assert found.loads


def test_arms_differ_in_their_speculation_only(tmp_path: Path) -> None:
    for triton in (OLD, NEWEST):
        rests = [
            {k: v for k, v in found.items() if not ("specul" in k or "ngram" in k)}
            for found in arguments(planned(parsed(tmp_path), triton)).values()
        ]
        assert all(rest == rests[0] for rest in rests)


@pytest.mark.parametrize(
    ("old", "new", "triton", "key"),
    [
        ("dtype: bfloat16", "kv_cache_memory_bytes: 1000000", OLD, "kv_cache_memory_bytes"),
        ("prompt_lookup_max: 4", "prompt_lookup_min: 2", OLD, "2.prompt_lookup_max"),
        ("k: [3, 5]", "k: 3, disable_padded_drafter_batch: true", OLD, "0.disable_padded"),
        ("k: [3, 5]", "k: 3, parallel_drafting: true", "25.06", "0.parallel_drafting"),
        ("method: eagle,", "method: eagle3,", OLD, "speculation.0.method"),
        ("method: eagle,", "method: eagle,", "25.10", "speculation.1.method"),  # draft_model
    ],
)
def test_what_the_containers_vllm_does_not_take_is_refused_by_its_key(
    tmp_path: Path, old: str, new: str, triton: str, key: str
) -> None:
    config = parsed(tmp_path, TEXT.replace(old, new))
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        planned(config, triton)


def test_an_argument_of_vllms_own_server_is_left_out_and_said(tmp_path: Path) -> None:
    config = parsed(tmp_path, TEXT.replace("dtype: bfloat16", "uvicorn_log_level: info"))
    made = planned(config)
    assert "uvicorn_log_level" not in made.models[0].arguments
    assert any("uvicorn_log_level" in note for note in made.notes)


def test_extra_args_and_extra_go_in_unchecked(tmp_path: Path) -> None:
    text = TEXT.replace("engine: {", "engine: {extra_args: {of_tomorrow: 1}, ")
    text = text.replace("k: [3, 5]", "k: 3, extra: {also_new: 2}")
    found = arguments(planned(parsed(tmp_path, text)))
    assert found["base_model"]["of_tomorrow"] == 1
    assert found["eagle_model"]["speculative_config"]["also_new"] == 2


def test_vllm_0_5_gets_the_block_manager_that_it_needs_to_speculate(tmp_path: Path) -> None:
    found = arguments(planned(parsed(tmp_path), "24.10"))
    assert found["eagle_model_k3"]["use_v2_block_manager"] is True
    assert "use_v2_block_manager" not in found["base_model"]


def test_config_pbtxt_names_the_backend_and_leaves_devices_to_vllm(tmp_path: Path) -> None:
    text = planned(parsed(tmp_path)).models[0].files()["config.pbtxt"]
    message = pbtxt.parse(text)
    assert message.text("backend") == "vllm"
    (group,) = message.messages("instance_group")
    assert (group.text("kind"), group.text("count")) == ("KIND_MODEL", "1")


# --- names ---------------------------------------------------------------------------------------


def test_names_are_settable_by_arm_by_label_and_by_method(tmp_path: Path) -> None:
    arms = arms_of(parsed(tmp_path))
    found = model_names(
        arms, {"vanilla": "slow", "eagle": "fast", "ngram-k3": "ng", "eagle-k5": "x"}
    )
    assert list(found.values()) == ["slow", "fast_k3", "x", "draft_model", "ng"]


@pytest.mark.parametrize(
    ("given_names", "said"),
    [
        ({"eagel": "x"}, r"eagel .* no such arm\. It has eagle"),
        ({"vanilla": "a b"}, "no name for a model"),
        ({"vanilla": "../up"}, "no name for a model"),
        ({"vanilla": "draft_model"}, "Two arms would be the model draft_model"),
    ],
)
def test_names_that_triton_or_the_config_does_not_take_are_refused(
    tmp_path: Path, given_names: dict[str, str], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        model_names(arms_of(parsed(tmp_path)), given_names)


# --- paths in the container ----------------------------------------------------------------------


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    return path


def test_local_models_are_mounted_and_named_by_where_they_are_mounted(tmp_path: Path) -> None:
    one, two = model_folder(tmp_path / "a" / "m 1"), model_folder(tmp_path / "b" / "m 1")
    config = parsed(tmp_path, TEXT.replace("org/target", str(one)).replace("org/draft", str(two)))
    made = planned(config)
    found = arguments(made)
    assert found["base_model"]["model"] == "/models/m-1"
    assert found["draft_model"]["speculative_config"]["model"] == "/models/m-1-2"
    assert made.mounts.folders == {"/models/m-1": one, "/models/m-1-2": two}
    assert made.mounts.uses_hub  # the head's


def test_a_snapshot_of_the_hubs_cache_is_mounted_with_its_blobs(tmp_path: Path) -> None:
    repo = tmp_path / "models--org--m"
    (repo / "blobs").mkdir(parents=True)
    (repo / "blobs" / "abc").write_text("{}", encoding="utf-8")
    snapshot = repo / "snapshots" / "123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to(Path("../../blobs/abc"))
    made = planned(parsed(tmp_path, TEXT.replace("org/target", str(snapshot))))
    assert made.models[0].arguments["model"] == "/models/123/snapshots/123"
    assert made.mounts.folders["/models/123"] == repo


def test_a_head_is_mounted_where_an_old_vllm_sees_that_it_is_one(tmp_path: Path) -> None:
    head = model_folder(tmp_path / "my head")
    config = parsed(tmp_path, TEXT.replace("org/EAGLE-head", str(head)))
    found = arguments(planned(config, "25.04"))["eagle_model_k3"]
    assert found["speculative_model"] == "/models/EAGLE-my-head"
    found = arguments(planned(config))["eagle_model_k3"]
    assert found["speculative_config"]["model"] == "/models/my-head"


def test_an_old_container_is_told_that_the_head_has_to_be_converted(tmp_path: Path) -> None:
    head = model_folder(tmp_path / "head")
    text = TEXT.replace("org/EAGLE-head", str(head))
    assert any("convert-eagle" in note for note in planned(parsed(tmp_path, text), OLD).notes)
    assert planned(parsed(tmp_path, text), "25.03").notes == ()
    (head / "config.json").write_text('{"model_type": "eagle"}', encoding="utf-8")
    assert planned(parsed(tmp_path, text), OLD).notes == ()


def test_without_a_container_paths_stay(tmp_path: Path) -> None:
    target = model_folder(tmp_path / "m")
    config = parsed(tmp_path, TEXT.replace("org/target", str(target)))
    made = planned(config, in_container=False)
    assert made.models[0].arguments["model"] == str(target)
    assert made.mounts.folders == {}


# --- the docker line -----------------------------------------------------------------------------


def test_the_docker_line_pastes_and_shows_nothing_to_the_network(tmp_path: Path) -> None:
    target = model_folder(tmp_path / "it's here")
    config = parsed(tmp_path, TEXT.replace("org/target", str(target)))
    env = {"HF_TOKEN": "hush", "VLLM_X": "a b"}
    container = versions.container(OLD)
    line = writing.docker_line(planned(config, OLD), tmp_path / "r", container, env=env)
    words = shlex.split(line)
    published = [words[i + 1] for i, word in enumerate(words) if word == "-p"]
    assert published == [f"127.0.0.1:{p}:{p}" for p in (8000, 8001, 8002)]
    mounts = [words[i + 1] for i, word in enumerate(words) if word == "-v"]
    assert f"{tmp_path / 'r'}:/model_repository:ro" in mounts
    assert f"{target}:/models/it-s-here:ro" in mounts
    assert "${HF_HOME:-$HOME/.cache/huggingface}:/root/.cache/huggingface" in mounts
    assert "hush" not in line
    assert "VLLM_X=a b" in words
    assert "nvcr.io/nvidia/tritonserver:25.02-vllm-python-py3" in words
    assert words[-1] == "--load-model=base_model"
    assert "--shm-size=1g" in words
    assert "--net=host" not in words


# --- writing -------------------------------------------------------------------------------------


def listing(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): p.read_text(encoding="utf-8") for p in files}


def test_writing_again_exchanges_our_models_and_takes_away_what_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    put(planned(parsed(tmp_path)), folder)
    assert "eagle_model_k5/1/model.json" in listing(folder)
    put(planned(parsed(tmp_path, TEXT.replace("[3, 5]", "[3]"))), folder)
    models = [name.split("/")[0] for name in listing(folder)]
    expected = {"base_model", "eagle_model", "draft_model", "ngram_model", writing.MARK}
    assert set(models) == expected
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_folder_of_somebody_else_stays_unless_forced(tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    (folder / "theirs" / "1").mkdir(parents=True)
    (folder / "theirs" / "1" / "model.json").write_text("{}", encoding="utf-8")
    before = listing(folder)
    with pytest.raises(UserError, match="did not write it"):
        put(planned(parsed(tmp_path)), folder)
    assert listing(folder) == before
    put(planned(parsed(tmp_path)), folder, force=True)
    assert listing(folder).items() > before.items()


def test_a_model_that_was_changed_by_hand_stays_unless_forced(tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    put(planned(parsed(tmp_path)), folder)
    changed = folder / "base_model" / "1" / "model.json"
    changed.write_text('{"model": "mine"}', encoding="utf-8")
    with pytest.raises(UserError, match=r"base_model/1/model\.json was changed"):
        put(planned(parsed(tmp_path)), folder)
    assert "mine" in changed.read_text(encoding="utf-8")
    put(planned(parsed(tmp_path)), folder, force=True)
    assert "mine" not in changed.read_text(encoding="utf-8")


@pytest.mark.parametrize("there_before", [False, True])
def test_a_full_disk_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there_before: bool
) -> None:
    folder = tmp_path / "repo"
    if there_before:
        put(planned(parsed(tmp_path, TEXT.replace("[3, 5]", "[3]"))), folder)
    before = listing(tmp_path)
    written: list[Path] = []

    def full(path: Path, text: str) -> None:
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        written.append(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    config = parsed(tmp_path)
    before["c.yaml"] = TEXT
    monkeypatch.setattr(writing, "_write_file", full)
    with pytest.raises(StoreError, match="No space left"):
        put(planned(config), folder)
    assert listing(tmp_path) == before


# --- the command ---------------------------------------------------------------------------------


def run(*args: str) -> Any:  # noqa: ANN401  (typer's own type is private)
    return CliRunner().invoke(app, ["triton", *args], catch_exceptions=True)


@pytest.mark.parametrize("spelling", [[], ["write"]])
def test_the_command_writes_and_prints_the_docker_line(tmp_path: Path, spelling: list[str]) -> None:
    parsed(tmp_path)
    folder = tmp_path / "repo"
    done = run(*spelling, "--triton", OLD, str(tmp_path / "c.yaml"), "-o", str(folder))
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("docker run ")
    assert "specbench models convert-eagle" in done.stderr
    said = json.loads((folder / "eagle_model_k3" / "1" / "model.json").read_text(encoding="utf-8"))
    assert said["num_speculative_tokens"] == 3
    assert run("check", str(folder)).exit_code == 0  # as the container that it was written for
    assert run("check", str(folder), "--triton", NEWEST).exit_code == 2


def test_for_a_triton_of_ones_own_paths_stay_and_the_line_starts_it(tmp_path: Path) -> None:
    if versions.installed() is None:
        pytest.skip("no vLLM is installed")
    target = model_folder(tmp_path / "m")
    parsed(tmp_path, TEXT.replace("org/target", str(target)))
    folder = tmp_path / "repo"
    done = run(str(tmp_path / "c.yaml"), "-o", str(folder), "--triton", "here")
    assert done.exit_code == 0, done.output
    said = json.loads((folder / "base_model" / "1" / "model.json").read_text(encoding="utf-8"))
    assert said["model"] == str(target)
    words = shlex.split(done.stdout)
    assert words[0] == "tritonserver"
    assert {f"--{kind}-address=127.0.0.1" for kind in ("http", "grpc", "metrics")} <= set(words)
    assert run("check", str(folder)).exit_code == 0


def test_a_dry_run_shows_the_files_and_writes_nothing(tmp_path: Path) -> None:
    parsed(tmp_path)
    done = run(str(tmp_path / "c.yaml"), "-o", str(tmp_path / "repo"), "--dry-run")
    assert '"num_speculative_tokens": 5' in done.stdout
    assert "docker run" in done.stdout
    assert not (tmp_path / "repo").exists()


def test_names_that_the_config_gives_for_a_run_are_those_that_are_written(tmp_path: Path) -> None:
    text = (
        "engine: {kind: triton, server: tritonserver, models: {vanilla: slow, eagle-k3: fast}, args"
    )
    config = parsed(tmp_path, TEXT.replace("engine: {args", text))
    assert [model.name for model in planned(config).models][:2] == ["slow", "fast"]
    named = planned(config, names={"vanilla": "other"})
    assert named.models[0].name == "other"


def test_names_on_the_command_line(tmp_path: Path) -> None:
    parsed(tmp_path)
    args = (str(tmp_path / "c.yaml"), "-o", str(tmp_path / "r"))
    assert run(*args, "--name", "vanilla=slow", "--name", "ngram=ng").exit_code == 0
    assert {"slow", "ng", "draft_model"} <= {p.name for p in (tmp_path / "r").iterdir()}
    assert "write ARM=NAME" in str(run(*args, "--name", "slow").exception)


# --- the text format -----------------------------------------------------------------------------


def test_the_text_format_is_read_in_all_its_spellings() -> None:
    message = pbtxt.parse(
        "# a comment\n"
        "name: \"a\" 'b'\n"
        "instance_group [ { count: 2 kind: KIND_GPU, gpus: [0, 1] }, < count: 1 > ];\n"
        'parameters: { key: "X" value: { string_value: "say \\"hi\\"" } }\n'
    )
    assert message.text("name") == "ab"
    first, second = message.messages("instance_group")
    assert first.all("gpus") == ["0", "1"]
    assert second.text("count") == "1"
    (value,) = message.messages("parameters")[0].messages("value")
    assert value.text("string_value") == 'say "hi"'
    assert message.line("parameters") == 4


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('backend "vllm"', 1),
        ("a: 1\nb {\n c: 2\n", 4),
        ("a: 1 }", 1),
        ("a: [1 2]", 1),
        ('a: "open\n', 1),
        ("a:\n", 2),
        ("{ }", 1),
        ("a: @", 1),
        ("x {" * 200, 1),
    ],
)
def test_text_that_is_no_text_format_is_refused_with_its_line(text: str, line: int) -> None:
    with pytest.raises(pbtxt.PbtxtError) as refused:
        pbtxt.parse(text)
    assert refused.value.line == line


@given(st.text(alphabet="ab:{}[]<>,;\"'#\\\n 1-", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    refused_at = 1
    try:
        pbtxt.parse(text)
    except pbtxt.PbtxtError as error:
        refused_at = error.line
    assert 1 <= refused_at <= text.count("\n") + 1
