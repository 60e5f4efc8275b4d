"""A model repository is judged before a server is: what would not load, and what would not compare."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from specbench.cli import app
from specbench.errors import UserError
from specbench.triton import check, versions
from specbench.triton.check import Checked, Finding
from specbench.triton.places import Places

PBTXT = 'backend: "vllm"\ninstance_group [\n  {\n    count: 1\n    kind: KIND_MODEL\n  }\n]\n'
OLD, NEWEST = "25.02", versions.newest()
EAGLE = {"method": "eagle", "model": "org/EAGLE-head", "num_speculative_tokens": 3}
BASE = {"model": "org/target"}


def add(repo: Path, name: str, said: Any, config: str | None = PBTXT) -> Path:  # noqa: ANN401
    """A model that says *said*: a mapping, or text as it is; None for no model.json."""
    version = repo / name / "1"
    version.mkdir(parents=True)
    if config is not None:
        (repo / name / "config.pbtxt").write_text(config, encoding="utf-8")
    if said is not None:
        text = said if isinstance(said, str) else json.dumps(said, indent=4)
        (version / "model.json").write_text(text, encoding="utf-8")
    return version / "model.json"


def judged(repo: Path, triton: str = NEWEST, **mounts: str) -> Checked:
    places = Places({f"/{inside}": path for inside, path in mounts.items()})
    return check.check(repo, versions.container(triton).takes, places)


def problems(found: Checked, level: str = "problem") -> list[str]:
    return [finding.as_line() for finding in found.findings if finding.level == level]


def only(found: Checked) -> Finding:
    (finding,) = found.findings
    return finding


def checkpoint(folder: Path, **config: Any) -> Path:  # noqa: ANN401
    folder.mkdir(parents=True)
    text = json.dumps({"model_type": "llama", "hidden_size": 8, **config})
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


# The public tutorial's template, in its shape: flat keys, paths of its container.
def tutorial(repo: Path) -> None:
    target = "/hf-models/Meta-Llama-3-8B-Instruct"
    add(repo, "base_model", {"model": target})
    flat = {
        "model": target,
        "speculative_model": "/hf-models/EAGLE-LLaMA3-Instruct-8B",
        "speculative_draft_tensor_parallel_size": 1,
        "num_speculative_tokens": 5,
    }
    add(repo, "eagle_model", flat)
    opt = {"model": "facebook/opt-6.7b", "speculative_model": "facebook/opt-125m"}
    add(repo, "opt_model", {**opt, "num_speculative_tokens": 5})


def hf_models(folder: Path) -> Path:
    checkpoint(folder / "Meta-Llama-3-8B-Instruct")
    checkpoint(folder / "EAGLE-LLaMA3-Instruct-8B")
    return folder


def test_each_flat_key_of_the_tutorials_template_is_named_with_its_new_place(
    tmp_path: Path,
) -> None:
    repo = tmp_path / "repo"
    tutorial(repo)
    found = judged(repo, **{"hf-models": str(hf_models(tmp_path / "hf"))})
    said = {(f.model, f.key): f for f in found.findings if f.level == "problem"}
    assert set(said) == {
        ("eagle_model", "speculative_model"),
        ("eagle_model", "speculative_draft_tensor_parallel_size"),
        ("eagle_model", "num_speculative_tokens"),
        ("opt_model", "speculative_model"),
        ("opt_model", "num_speculative_tokens"),
    }
    k = said["eagle_model", "num_speculative_tokens"]
    assert (k.line, k.hint) == (5, "It is speculative_config.num_speculative_tokens now.")
    whole = said["eagle_model", "speculative_model"].hint or ""
    block = json.loads(whole.partition('"speculative_config": ')[2])
    assert block == {
        "method": "eagle",
        "model": "/hf-models/EAGLE-LLaMA3-Instruct-8B",
        "draft_tensor_parallel_size": 1,
        "num_speculative_tokens": 5,
    }
    assert not found.loads


def test_the_block_that_the_checker_writes_out_passes_the_checker(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    tutorial(repo)
    hf = {"hf-models": str(hf_models(tmp_path / "hf"))}
    whole = next(f.hint or "" for f in judged(repo, **hf).findings if "In all" in (f.hint or ""))
    block = json.loads(whole.partition('"speculative_config": ')[2])
    fixed = tmp_path / "fixed"
    said = {"model": "/hf-models/Meta-Llama-3-8B-Instruct", "speculative_config": block}
    add(fixed, "eagle_model", said)
    assert judged(fixed, **hf).findings == ()


def test_the_tutorials_template_is_right_for_its_own_container_but_for_the_head(
    tmp_path: Path,
) -> None:
    repo = tmp_path / "repo"
    tutorial(repo)
    hf = {"hf-models": str(hf_models(tmp_path / "hf"))}
    (line,) = problems(judged(repo, OLD, **hf))
    assert "convert-eagle" in line
    assert judged(repo, "25.03", **hf).findings == ()


def test_a_new_block_is_refused_by_an_old_container_with_the_flat_keys(tmp_path: Path) -> None:
    add(tmp_path, "eagle_model", {**BASE, "speculative_config": EAGLE})
    (line, *_) = problems(judged(tmp_path, OLD))
    assert "does not know it yet" in line
    assert "speculative_model" in line


@pytest.mark.parametrize(
    ("said", "key", "line", "words"),
    [
        ({**BASE, "max_modle_len": 5}, "max_modle_len", 3, "Did you mean max_model_len?"),
        ({**BASE, "device": "cuda"}, "device", 3, "no successor"),
        ({**BASE, "host": "0.0.0.0"}, "host", 3, "no such engine argument"),
        ({**BASE, "ngram_prompt_lookup_max": 4}, "ngram_prompt_lookup_max", 3, "prompt_lookup_max"),
        (
            {**BASE, "speculative_config": {**EAGLE, "ngram_prompt_lookup_max": 4}},
            "speculative_config.ngram_prompt_lookup_max",
            7,
            "Write prompt_lookup_max.",
        ),
        (
            {**BASE, "speculative_config": {**EAGLE, "num_speculative_token": 4}},
            "speculative_config.num_speculative_token",
            7,
            "Did you mean num_speculative_tokens?",
        ),
        (
            {**BASE, "speculative_config": {**EAGLE, "method": "eagel"}},
            "speculative_config.method",
            4,
            "Did you mean eagle?",
        ),
        (
            {**BASE, "speculative_config": {"method": "eagle", "num_speculative_tokens": 2}},
            "speculative_config.model",
            3,
            "needs a draft",
        ),
        (
            {**BASE, "speculative_config": {**EAGLE, "num_speculative_tokens": 0}},
            "speculative_config.num_speculative_tokens",
            6,
            "from 1, not 0",
        ),
        (
            {**BASE, "speculative_config": {"method": "ngram", "prompt_lookup_max": 3}},
            "speculative_config.num_speculative_tokens",
            3,
            "is missing",
        ),
        ({**BASE, "speculative_config": "{}"}, "speculative_config", 3, "mapping"),
        ({"model": 3}, "model", 2, "path or a hub id"),
        (
            {**BASE, "speculative_config": {**EAGLE, "model": "/gone"}},
            "speculative_config.model",
            5,
            "/gone is not there",
        ),
    ],
)
def test_what_would_not_load_is_named_with_key_line_and_remedy(
    tmp_path: Path, said: dict[str, Any], key: str, line: int | None, words: str
) -> None:
    add(tmp_path, "m", said)
    (finding, *_) = [f for f in judged(tmp_path).findings if f.level == "problem"]
    assert (finding.key, finding.line) == (key, line)
    assert words in finding.as_line()


def test_a_model_that_is_right_has_no_findings(tmp_path: Path) -> None:
    add(tmp_path, "base_model", BASE)
    add(tmp_path, "eagle_model", {**BASE, "speculative_config": EAGLE})
    found = judged(tmp_path)
    assert found.findings == ()
    assert found.loads


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('{\n "model": "m",\n "dtype": float16\n}', 3, "not valid JSON"),
        ('{\n "model": "m",\n}', 2, "not valid JSON"),
        ("[1]", 1, "should be a mapping"),
        ("", 1, "not valid JSON"),
        (None, None, "is missing"),
    ],
)
def test_model_json_that_cannot_be_read_is_named_with_its_line(
    tmp_path: Path, text: str | None, line: int | None, words: str
) -> None:
    path = add(tmp_path, "m", text)
    finding = only(judged(tmp_path))
    assert finding.level == "problem"
    assert finding.path == str(path)
    assert words in finding.message
    # Python's own idea of where a trailing comma's error is changed in 3.13.
    assert finding.line == line or (text and "," in text and finding.line is not None)


def test_a_key_that_stands_twice_is_said(tmp_path: Path) -> None:
    add(tmp_path, "m", '{"model": "org/a", "model": "org/b"}')
    assert "stands twice" in only(judged(tmp_path)).as_line()


# --- files and config.pbtxt ----------------------------------------------------------------------


def test_missing_files_are_named_with_what_belongs_there(tmp_path: Path) -> None:
    add(tmp_path, "no_config", BASE, config=None)
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "config.pbtxt").write_text(PBTXT, encoding="utf-8")
    (tmp_path / "flat" / "model.json").write_text("{}", encoding="utf-8")
    misplaced, without = problems(judged(tmp_path))
    assert "flat/1/model.json: is missing" in misplaced
    assert "Move" in misplaced
    assert (
        'no_config/config.pbtxt: is missing: Triton does not know the backend. It needs: backend: "vllm"'
        in without
    )


@pytest.mark.parametrize(
    ("config", "level", "words"),
    [
        (PBTXT.replace("vllm", "python"), "note", "of python, not of vllm"),
        ('platform: "ensemble"\n', "note", "of ensemble, not of vllm"),
        (PBTXT.replace('backend: "vllm"\n', ""), "problem", 'Write backend: "vllm"'),
        ('name: "other"\n' + PBTXT, "problem", "is other, and the folder m"),
        (PBTXT + "}\n", "problem", "config.pbtxt, line 8: not valid"),
        ('backend: "vllm"\n', "warning", "an engine on every GPU"),
        (PBTXT.replace("KIND_MODEL", "KIND_GPU"), "warning", "asks for KIND_MODEL"),
        (PBTXT.replace("KIND_MODEL", "KIND_GPUS"), "problem", "no kind of instance"),
        (PBTXT.replace("count: 1", "count: 2"), "warning", "2 engines"),
        (
            PBTXT + 'parameters: { key: "report_custom_metrics" value: { string_value: "true" } }',
            "warning",
            "Write REPORT_CUSTOM_METRICS",
        ),
    ],
)
def test_config_pbtxt_is_read_as_triton_reads_it(
    tmp_path: Path, config: str, level: str, words: str
) -> None:
    add(tmp_path, "m", BASE, config)
    finding = only(judged(tmp_path))
    assert finding.level == level
    assert words in finding.as_line()


def test_an_engine_on_two_gpus_needs_an_instance_that_leaves_them_to_it(tmp_path: Path) -> None:
    add(tmp_path, "m", {**BASE, "tensor_parallel_size": 2}, PBTXT.replace("KIND_MODEL", "KIND_GPU"))
    assert "this one is on 2" in only(judged(tmp_path)).message
    assert not judged(tmp_path).loads


def test_gpu_ids_have_to_be_as_many_as_the_engine_is_on(tmp_path: Path) -> None:
    parameter = 'parameters: { key: "GPU_DEVICE_IDS" value: { string_value: "0,1,2" } }'
    add(tmp_path, "m", {**BASE, "tensor_parallel_size": 2}, PBTXT + parameter)
    assert "names 3 GPUs; the engine is on 2" in only(judged(tmp_path)).message


def test_metrics_that_log_stats_keep_silent_are_said(tmp_path: Path) -> None:
    parameter = 'parameters: { key: "REPORT_CUSTOM_METRICS" value: { string_value: "true" } }'
    add(tmp_path, "m", {**BASE, "disable_log_stats": True}, PBTXT + parameter)
    (line,) = problems(judged(tmp_path), "warning")
    assert "REPORT_CUSTOM_METRICS reports nothing" in line
    assert judged(tmp_path).loads


def test_lora_without_its_file_would_not_load(tmp_path: Path) -> None:
    path = add(tmp_path, "m", {**BASE, "enable_lora": "true"})
    assert "multi_lora.json" in only(judged(tmp_path)).message
    path.with_name("multi_lora.json").write_text("{}", encoding="utf-8")
    assert judged(tmp_path).findings == ()


# --- what would not compare ----------------------------------------------------------------------


def test_a_base_model_that_speculates_is_said(tmp_path: Path) -> None:
    add(tmp_path, "base_model", {**BASE, "speculative_config": EAGLE})
    (line,) = problems(judged(tmp_path), "warning")
    assert "a base model that speculates" in line
    add(tmp_path, "eagle_model", {**BASE, "speculative_config": EAGLE})
    assert len(problems(judged(tmp_path), "warning")) == 1


def test_arguments_that_differ_between_models_of_one_target_are_said(tmp_path: Path) -> None:
    add(tmp_path, "base_model", {**BASE, "max_num_seqs": 1})
    add(tmp_path, "eagle_model", {**BASE, "speculative_config": EAGLE, "max_num_seqs": 2})
    add(tmp_path, "of_another_target", {"model": "org/other", "max_num_seqs": 3})
    finding = only(judged(tmp_path))
    assert (finding.level, finding.model, finding.key) == ("warning", "eagle_model", "max_num_seqs")
    assert "2 here and 1 in base_model" in finding.message


# --- drafts --------------------------------------------------------------------------------------


def eagle_with(tmp_path: Path, draft: str, **more: Any) -> Path:  # noqa: ANN401
    target = checkpoint(tmp_path / "target")
    block = {**EAGLE, "model": draft, **more}
    repo = tmp_path / "repo"
    add(repo, "eagle_model", {"model": str(target), "speculative_config": block})
    return repo


def test_a_draft_that_is_not_there_would_not_load(tmp_path: Path) -> None:
    repo = eagle_with(tmp_path, str(tmp_path / "gone"))
    finding = only(judged(repo))
    assert (finding.level, finding.key) == ("problem", "speculative_config.model")
    assert "is not there" in finding.message


def test_a_path_of_a_container_is_looked_for_where_it_is_mounted_from(tmp_path: Path) -> None:
    head = checkpoint(tmp_path / "here" / "head")
    repo = eagle_with(tmp_path, "/hf-models/head")
    assert "--mount /hf-models=FOLDER" in only(judged(repo)).as_line()
    assert judged(repo, **{"hf-models": str(head.parent)}).findings == ()


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    repo = eagle_with(tmp_path, str(tmp_path / "empty"))
    assert "has no config.json" in only(judged(repo)).message


def test_a_head_of_another_target_would_not_load(tmp_path: Path) -> None:
    repo = eagle_with(tmp_path, str(checkpoint(tmp_path / "head", hidden_size=16)))
    assert "hidden size 16, the target has 8" in only(judged(repo)).message


@pytest.mark.parametrize(
    ("method", "architecture", "words"),
    [
        ("eagle", "LlamaForCausalLMEagle3", "is an EAGLE-3 head"),
        ("eagle3", "LlamaForCausalLM", "is no EAGLE-3 head"),
    ],
)
def test_a_head_of_another_kind_is_said(
    tmp_path: Path, method: str, architecture: str, words: str
) -> None:
    head = checkpoint(tmp_path / "head", architectures=[architecture])
    repo = eagle_with(tmp_path, str(head), method=method)
    assert words in only(judged(repo)).message


def test_a_head_that_an_old_vllm_would_take_for_a_draft_model_is_said(tmp_path: Path) -> None:
    head = checkpoint(tmp_path / "my-eagle")
    said = {"speculative_model": str(head), "num_speculative_tokens": 3}
    add(tmp_path / "repo", "m", {"model": str(checkpoint(tmp_path / "target")), **said})
    (line,) = problems(judged(tmp_path / "repo", "25.04"), "warning")
    assert 'its path has no "eagle-"' in line


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)
KEYS = ["model", "speculative_config", "speculative_model", "num_speculative_tokens", "dtype"]
INNER = ["method", "model", "num_speculative_tokens"]
REFS = st.sampled_from(
    ["~nobody/m", "a/b", "/", ".", "\0", "a" * 5000, "eagle", "[ngram]", "eagle3"]
)


@settings(max_examples=30)
@given(
    said=st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), ANY_JSON | REFS),
    block=st.none() | st.dictionaries(st.sampled_from(INNER), ANY_JSON | REFS),
    triton=st.sampled_from(["24.10", OLD, "25.04", NEWEST]),
)
def test_any_json_is_judged_and_the_judgement_is_json(
    said: dict[str, Any], block: dict[str, Any] | None, triton: str
) -> None:
    if block is not None:
        said["speculative_config"] = block
    with tempfile.TemporaryDirectory() as folder:
        add(Path(folder), "m", said)
        found = judged(Path(folder), triton)
        json.dumps(found.document())
        assert all(finding.as_line() for finding in found.findings)


# --- the command ---------------------------------------------------------------------------------


def run(*args: str) -> Any:  # noqa: ANN401  (typer's own type is private)
    return CliRunner().invoke(app, ["triton", "check", *args])


def test_exit_2_and_json_where_something_would_not_load(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    tutorial(repo)
    done = run(str(repo), "--triton", NEWEST, "--json", "--mount", f"/hf-models={tmp_path}")
    assert done.exit_code == 2
    found = json.loads(done.stdout)
    assert found["loads"] is False
    assert found["models"] == ["base_model", "eagle_model", "opt_model"]
    assert {"level", "model", "path", "line", "key", "message", "hint"} == set(found["findings"][0])


def test_exit_0_where_nothing_is_wrong_for_the_vllm_that_is_here(tmp_path: Path) -> None:
    add(tmp_path, "base_model", BASE)
    done = run(str(tmp_path))
    assert done.exit_code == 0
    here = versions.installed() or versions.container(NEWEST).takes
    assert f"as vLLM {here.short} would" in done.stdout


def test_what_the_installed_vllm_takes_leaves_out_its_api_servers_arguments() -> None:
    here = versions.installed()
    if here is None:
        pytest.skip("no vLLM is installed")
    assert {"model", "speculative_config"} <= here.engine_args
    assert not {"host", "uvicorn_log_level", "api_key"} & here.engine_args


@pytest.mark.parametrize("make", ["nothing", "file", "model", "empty"])
def test_what_is_no_repository_is_refused(tmp_path: Path, make: str) -> None:
    folder = tmp_path / "x"
    if make == "file":
        folder.write_text("", encoding="utf-8")
    elif make == "model":
        add(tmp_path, "x", BASE)
    elif make == "empty":
        folder.mkdir()
    with pytest.raises(UserError):
        judged(folder)


def test_a_mount_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="INSIDE=FOLDER"):
        Places.read(["hf-models"])
