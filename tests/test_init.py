"""`specbench init`: three answers to a config that loads."""

import io
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specbench import cli, init
from specbench.config import load
from specbench.errors import ConfigError, UserError
from specbench.init import Answers


def run_cli(*args: str, answers: str = "", cwd: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["specbench", *args])
        patch.setattr(sys, "stdin", io.StringIO(answers))
        patch.chdir(cwd)
        with pytest.raises(SystemExit) as end:
            cli.main()
    return int(end.value.code or 0)


@pytest.mark.parametrize("model", init.HEADS)
def test_every_suggested_draft_makes_a_config_that_loads(tmp_path: Path, model: str) -> None:
    for number, head in enumerate(init.heads_for(model)):
        path = tmp_path / f"{number}.yaml"
        init.write(Answers(model, head.method, head.model), path)
        config = load(path)
        assert config.model == model
        assert config.speculation[0].model == head.model
        assert head.source


def test_a_model_is_known_however_it_is_written() -> None:
    assert init.suggested("QWEN/qwen3-8b") == "eagle3 RedHatAI/Qwen3-8B-speculator.eagle3"
    assert init.suggested("nobody/knows-it") == "ngram"


def test_a_method_alone_gets_the_known_draft_of_that_method() -> None:
    model = "meta-llama/Llama-3.1-8B-Instruct"
    assert init.drafting("eagle", model) == ("eagle", "yuhuili/EAGLE-LLaMA3.1-Instruct-8B")
    assert init.drafting("eagle3 mine/head", model) == ("eagle3", "mine/head")
    assert init.drafting("ngram", model) == ("ngram", None)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("eagle", "none is known for nobody/knows-it"),
        ("medussa x", "no method 'medussa'"),
        ("", "METHOD"),
        ("a b c", "METHOD"),
    ],
)
def test_an_answer_that_makes_no_config_says_what_does(answer: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        init.drafting(answer, "nobody/knows-it")


def test_eagles_own_heads_get_the_context_that_they_were_trained_on(tmp_path: Path) -> None:
    model = "meta-llama/Llama-3.1-8B-Instruct"
    config = init.write(Answers(model, *init.drafting("eagle3", model)), tmp_path / "a.yaml")
    assert config.engine.args["max_model_len"] == 2048


def test_what_does_not_load_is_not_written(tmp_path: Path) -> None:
    for bad in (Answers("", "ngram", None), Answers("m", "ngram", None, k=(3, 3))):
        with pytest.raises(ConfigError, match="the config of these answers"):
            init.write(bad, tmp_path / "a.yaml")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_never_replaced_unasked(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="is there already"):
        init.write(Answers("m", "ngram", None), path)
    assert path.read_text(encoding="utf-8") == "mine"
    init.write(Answers("m", "ngram", None), path, overwrite=True)
    assert load(path).model == "m"


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(model=st.text(min_size=1, max_size=30), prompts=st.lists(st.text(max_size=10), max_size=3))
def test_any_names_come_back_from_the_yaml_as_they_were(
    tmp_path: Path, model: str, prompts: list[str]
) -> None:
    path = tmp_path / "any.yaml"
    path.unlink(missing_ok=True)
    try:
        names = init.prompt_names(",".join(prompts))
        init.write(Answers(model, "ngram", None, names), path)
    except UserError:
        assert not path.exists()
        return
    config = load(path)
    assert config.model == model
    assert tuple(one.set for one in config.prompts) == names


def test_yes_takes_the_defaults_and_runs_anywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("init", "--yes", cwd=tmp_path) == 0
    said = capsys.readouterr()
    assert said.out == "demo_target_eagle.yaml\n"
    assert "specbench convert humaneval" in said.err
    assert "specbench run --config demo_target_eagle.yaml" in said.err
    assert load(tmp_path / "demo_target_eagle.yaml").model == "demo:target"
    assert run_cli("init", "--yes", cwd=tmp_path) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert run_cli("init", "--yes", "--overwrite", cwd=tmp_path) == 0


def test_three_questions_and_their_suggestions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "configs").mkdir()
    assert run_cli("init", answers="Qwen/Qwen3-8B\n\nhumaneval\n", cwd=tmp_path) == 0
    said = capsys.readouterr().err
    assert "eagle3 AngelSlim/Qwen3-8B_eagle3 (github.com/SafeAILab/EAGLE, README)" in said
    config = load(tmp_path / "configs" / "qwen3_8b_eagle3.yaml")
    assert config.speculation[0].model == "RedHatAI/Qwen3-8B-speculator.eagle3"
    assert [one.set for one in config.prompts] == ["humaneval"]


def test_a_file_that_is_there_is_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("mine", encoding="utf-8")
    given_all = ["init", "--model", "m", "--method", "ngram", "--prompts", "p", "-o", "a.yaml"]
    assert run_cli(*given_all, answers="n\n", cwd=tmp_path) == 2
    assert path.read_text(encoding="utf-8") == "mine"
    assert run_cli(*given_all, answers="", cwd=tmp_path) == 2
    assert "Nobody answered" in capsys.readouterr().err
    assert run_cli(*given_all, answers="y\n", cwd=tmp_path) == 0
    assert load(path).model == "m"
