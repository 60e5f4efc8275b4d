"""Whatever stands in a YAML file, it loads as meant or is refused with the file and the key."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench import config, vllm_names
from specbench.config import Config
from specbench.errors import ConfigError

ROOT = Path(__file__).parents[1]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))
BASE = "model: m\nprompts: p\n"
NGRAM = BASE + "speculation: {method: ngram, k: 1}\n"
TWO_METHODS = BASE + "speculation: [{method: ngram, k: 1}, {method: suffix, k: 2}]\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mine.yaml"


def load(path: Path, text: str | bytes, *overrides: str) -> Config:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return config.load(path, overrides)


def refusal(path: Path, text: str | bytes, *overrides: str) -> str:
    """What the user reads, without the file's name (which has to be there)."""
    with pytest.raises(ConfigError) as caught:
        load(path, text, *overrides)
    said = str(caught.value)
    assert "\n" not in said
    if not overrides:
        assert said.startswith(str(path))
    return said.removeprefix(str(path)).lstrip(":, ")


def speculation(*lines: str) -> str:
    return BASE + "speculation:\n" + "".join(f"  {line}\n" for line in lines)


# --- what is shipped -----------------------------------------------------------------------------


def test_the_configs_named_in_the_readme_are_there() -> None:
    names = {path.stem for path in SHIPPED}
    assert names >= {"vanilla", "eagle_k5", "eagle3_k5", "draft_k5", "ngram_k5", "pr16035", "sweep"}
    assert "demo" in names


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_loads_and_survives_its_run_json(shipped: Path) -> None:
    loaded = config.load(shipped)
    stored = json.loads(json.dumps(loaded.model_dump(mode="json"), allow_nan=False))
    assert Config.model_validate(stored) == loaded


# --- defaults and forms --------------------------------------------------------------------------


def test_sampling_is_complete_without_a_sampling_section(path: Path) -> None:
    """Case C3: a server's own defaults never fill a gap."""
    assert load(path, BASE).sampling.body() == {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "seed": 0,
        "ignore_eos": False,
        "stop": None,
    }


def test_one_stop_text_stands_for_a_list(path: Path) -> None:
    body = load(path, BASE + "sampling: {stop: END}").sampling.body()
    assert body["stop"] == ["END"]


def test_an_axis_takes_one_value_or_a_list(path: Path) -> None:
    loaded = load(path, BASE + "max_tokens: 256\nconcurrency: [1, 4]\n")
    assert (loaded.max_tokens, loaded.concurrency) == ((256,), (1, 4))


def test_k_zero_is_an_allowed_k(path: Path) -> None:
    """Case A2."""
    assert load(path, speculation("method: ngram", "k: [0, 1, 3]")).speculation[0].k == (0, 1, 3)


def test_keys_of_vllm_pass_through_to_its_speculative_config(path: Path) -> None:
    text = speculation(
        "method: draft_model", "model: d", "k: 3", "max_model_len: 64", "extra: {brand_new: 1}"
    )
    assert load(path, text).speculation[0].vllm_config(3) == {
        "method": "draft_model",
        "model": "d",
        "num_speculative_tokens": 3,
        "max_model_len": 64,
        "brand_new": 1,
    }


def test_engine_arguments_are_taken_as_fields_or_flags(path: Path) -> None:
    text = BASE + "engine: {args: {--max-model-len: 64, dtype: float32, enforce-eager: true}}"
    assert load(path, text).engine.args == {
        "max_model_len": 64,
        "dtype": "float32",
        "enforce_eager": True,
    }


def test_a_date_stays_the_text_that_was_written(path: Path) -> None:
    loaded = load(path, BASE + "engine: {args: {revision: 2025-01-31}}")
    assert loaded.engine.args == {"revision": "2025-01-31"}


def test_stars_and_ampersands_in_text_are_no_aliases(path: Path) -> None:
    text = BASE + "description: fast - *really* fast & 'so' # &a\nsampling: {stop: ['*a', '&b']}"
    loaded = load(path, text)
    assert loaded.description == "fast - *really* fast & 'so'"
    assert loaded.sampling.stop == ("*a", "&b")


def test_a_byte_order_mark_is_no_part_of_the_first_key(path: Path) -> None:
    assert load(path, b"\xef\xbb\xbf" + BASE.encode()).model == "m"


# --- keys that are not known ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        (BASE + "repeat: 3", "repeat", "repeats"),
        (BASE + "sampling: {temprature: 0}", "sampling.temprature", "temperature"),
        (BASE + "engine: {argz: {}}", "engine.argz", "args"),
        (BASE + "load: {warmups: 1}", "load.warmups", "warmup"),
        ("model: m\nprompts: [{set: p, limits: 3}]", "prompts.0.limits", "limit"),
        (BASE + "engine: {args: {max_model_le: 3}}", "engine.args", "max_model_len"),
        (
            speculation("method: ngram", "k: 1", "prompt_lookup_mx: 4"),
            "speculation.0",
            "prompt_lookup_max",
        ),
    ],
)
def test_an_unknown_key_names_the_nearest_one(
    path: Path, text: str, key: str, nearest: str
) -> None:
    said = refusal(path, text)
    assert said.startswith(f"{key}: unknown key ")
    assert f"did you mean {nearest!r}?" in said


@pytest.mark.parametrize(
    ("text", "old", "now"),
    [
        pytest.param(
            speculation("method: ngram", "k: 4", "ngram_prompt_lookup_max: 4"),
            "ngram_prompt_lookup_max",
            "prompt_lookup_max",
            id="A1a",
        ),
        pytest.param(
            BASE + "speculative_model: d\nnum_speculative_tokens: 5",
            "speculative_model",
            "speculation.model",
            id="A1b",
        ),
        pytest.param(
            BASE + "num_speculative_tokens: 5",
            "num_speculative_tokens",
            "speculation.k",
            id="A1b-count",
        ),
        pytest.param(
            speculation(
                "method: draft_model",
                "model: d",
                "k: 3",
                "draft_tensor_parallel_size: 1",
                "speculative_draft_tensor_parallel_size: 1",
            ),
            "speculative_draft_tensor_parallel_size",
            "draft_tensor_parallel_size",
            id="A1c",
        ),
        pytest.param(
            speculation("method: ngram", "num_speculative_tokens: 3"),
            "num_speculative_tokens",
            "k",
            id="vllm-name-of-k",
        ),
        pytest.param(
            BASE + "engine: {args: {speculative-model: d}}",
            "speculative_model",
            "speculation.model",
            id="as-engine-argument",
        ),
    ],
)
def test_an_old_key_names_its_present_spelling(path: Path, text: str, old: str, now: str) -> None:
    said = refusal(path, text)
    assert repr(old) in said
    assert said.endswith(f"write {now}")


def test_a_misspelt_vllm_name_of_k_leads_to_k(path: Path) -> None:
    """Case A1 d."""
    said = refusal(path, speculation("method: ngram", "num_speculative_token: 3"))
    assert said == "speculation.0: unknown key 'num_speculative_token'; did you mean 'k'?"


@pytest.mark.parametrize("key", ["max_model_len", "max-model-len"])
def test_an_engine_argument_at_the_top_is_told_where_it_goes(path: Path, key: str) -> None:
    said = refusal(path, BASE + f"{key}: 2048")
    assert said == f"{key}: is an engine argument; write it as engine.args.max_model_len"


def test_an_engine_argument_in_two_spellings_is_refused(path: Path) -> None:
    text = BASE + "engine: {args: {max-model-len: 3, max_model_len: 4}}"
    assert refusal(path, text) == "engine.args: max_model_len stands twice, in two spellings"


@pytest.mark.parametrize("key", ["model", "host", "port", "served_model_name", "api_key"])
def test_what_specbench_sets_is_no_engine_argument(path: Path, key: str) -> None:
    assert "specbench sets" in refusal(path, BASE + f"engine: {{args: {{{key}: x}}}}")


@pytest.mark.parametrize("key", ["speculative_config", "spec_method", "spec_model", "spec_tokens"])
def test_no_engine_argument_can_make_the_baseline_speculate(path: Path, key: str) -> None:
    said = refusal(path, BASE + f"engine: {{args: {{{key}: x}}}}")
    assert said.endswith(f"{key} would speculate in the baseline too; use `speculation`")


@pytest.mark.parametrize("key", ["method", "model", "num_speculative_tokens"])
@pytest.mark.parametrize("place", ["extra", "options"])
def test_no_side_door_changes_what_a_row_says(path: Path, key: str, place: str) -> None:
    said = refusal(path, speculation("method: ngram", "k: 1", f"{place}: {{{key}: 7}}"))
    assert key in said


def test_options_are_checked_like_keys_beside_method(path: Path) -> None:
    said = refusal(path, speculation("method: ngram", "k: 1", "options: {prompt_lookup_mx: 1}"))
    assert "did you mean 'prompt_lookup_max'?" in said


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("-1", "should be greater than or equal to 0 (not -1)"),
        ('"3"', "should be a whole number (not '3')"),
        ("2.5", "should be a whole number (not 2.5)"),
        ("null", "should be a whole number (not None)"),
        ("true", "should be a whole number (not True)"),
        ("1000000", "should be less than or equal to 1000 (not 1000000)"),
    ],
)
def test_a_bad_k_is_refused_by_its_place(path: Path, bad: str, said: str) -> None:
    """Case A2: the list [0, 1, 3, -1, "3", 2.5, null], one bad value at a time."""
    text = speculation("method: ngram", f"k: [0, 1, 3, {bad}]")
    assert refusal(path, text) == f"speculation.0.k.3: {said}"


def test_the_first_bad_k_of_many_is_the_one_named(path: Path) -> None:
    text = speculation("method: ngram", 'k: [0, 1, 3, -1, "3", 2.5, null]')
    assert refusal(path, text).startswith("speculation.0.k.3: ")


def test_k_is_never_defaulted(path: Path) -> None:
    assert refusal(path, speculation("method: ngram")) == "speculation.0.k: is missing"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("repeats: true", "repeats: should be a whole number (not True)"),
        ("seed: true", "seed: should be a whole number (not True)"),
        ("seed: -1", "seed: should be greater than or equal to 0 (not -1)"),
        ("sampling: {temperature: true}", "sampling.temperature: should be a number"),
        ("sampling: {top_k: true}", "sampling.top_k: should be a whole number (not True)"),
        ("sampling: {ignore_eos: 'no'}", "sampling.ignore_eos: should be true or false (not 'no')"),
        ("sampling: {stop: [a, 5]}", "sampling.stop.1: should be text (not 5)"),
        ("sampling: {stop: ['']}", "sampling.stop.0: should not be empty (not '')"),
        ("load: {warmup: true}", "load.warmup: should be a whole number (not True)"),
        ("load: {warmup: -1}", "load.warmup: should be greater than or equal to 0 (not -1)"),
        ("max_tokens: [1, 0]", "max_tokens.1: should be greater than 0 (not 0)"),
        ("max_tokens: []", "max_tokens: needs at least one value"),
        ("max_tokens: [256, 256]", "max_tokens: a value stands twice in the list"),
        ("speculation: {method: ngram, k: []}", "speculation.0.k: needs at least one value"),
        ("speculation: eagle", "speculation.0: should be a mapping of keys (not 'eagle')"),
        ("speculation: ~", "speculation.0: should be a mapping of keys (not None)"),
        ("engine: {args: ~}", "engine.args: should be a mapping of keys (not None)"),
        ("engine: {env: {A: 5}}", "engine.env.A: should be text (not 5)"),
        ("on: 1", "1: a key should be text (not True)"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_its_key(path: Path, lines: str, said: str) -> None:
    assert refusal(path, BASE + lines) == said


def test_a_number_that_would_plan_for_ever_is_refused(path: Path) -> None:
    assert "less than or equal to 1000000" in refusal(path, BASE + f"repeats: {'9' * 30}")
    assert "is not a number" in refusal(path, BASE + f"repeats: {'9' * 5000}")


@pytest.mark.parametrize("number", [".nan", ".inf", "-.inf"])
def test_no_infinite_number_gets_in_anywhere(path: Path, number: str) -> None:
    said = refusal(path, BASE + f"engine:\n  args:\n    gpu_memory_utilization: {number}\n")
    assert said == f"line 5: not valid YAML: {number} is not a number to measure with."


def test_what_no_command_line_can_say_is_refused(path: Path) -> None:
    assert "JSON" in refusal(path, BASE + "engine: {args: {dtype: !!set {a, b}}}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prompts: p", "model: is missing"),
        ("model: ''\nprompts: p", "model: should not be empty (not '')"),
        ("model: m", "prompts: is missing"),
        ("model: m\nprompts: []", "prompts: needs at least one value"),
        ("model: m\nprompts: ''", "prompts.0.set: should not be empty (not '')"),
        ("model: m\nprompts: [5]", "prompts.0: should be a mapping of keys (not 5)"),
    ],
)
def test_a_config_needs_a_model_and_prompts(path: Path, text: str, said: str) -> None:
    assert refusal(path, text) == said


def test_an_empty_list_of_methods_is_the_baseline_alone(path: Path) -> None:
    assert load(path, BASE + "speculation: []").speculation == ()


# --- methods -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", sorted(vllm_names.recorded().methods))
def test_every_method_that_vllm_knows_is_accepted(path: Path, method: str) -> None:
    loaded = load(path, speculation(f"method: {method}", "model: d", "k: 2"))
    assert loaded.speculation[0].vllm_config(2)["method"] == method


def test_a_misspelt_method_names_the_nearest(path: Path) -> None:
    said = refusal(path, speculation("method: eagel", "model: d", "k: 2"))
    assert said == "speculation.0.method: vLLM has no method 'eagel'; did you mean 'eagle'?"


def test_a_method_like_none_other_lists_them_all(path: Path) -> None:
    said = refusal(path, speculation("method: qqqqqq", "k: 2"))
    assert all(method in said for method in ("eagle3", "draft_model", "suffix"))


@pytest.mark.parametrize("method", ["vanilla", "none"])
def test_vanilla_is_not_asked_for(path: Path, method: str) -> None:
    assert "added by itself" in refusal(path, speculation(f"method: {method}", "k: 2"))


@pytest.mark.parametrize("method", ["eagle", "eagle3", "draft_model", "medusa"])
def test_a_method_with_a_draft_needs_its_path(path: Path, method: str) -> None:
    said = refusal(path, speculation(f"method: {method}", "k: 2"))
    assert said == f"speculation.0: method {method} needs `model`: the path or hub id of its draft"


# --- servers and tapes ---------------------------------------------------------------------------


def test_a_server_that_is_up_takes_no_arguments(path: Path) -> None:
    said = refusal(path, BASE + "engine: {url: 'http://h:1', args: {dtype: half}}")
    assert said.startswith("engine: a server that is already up (url) takes no args")


def test_a_server_that_is_up_is_one_arm(path: Path) -> None:
    said = refusal(
        path, BASE + "engine: {url: 'http://h:1'}\nspeculation: {method: ngram, k: [1, 2]}"
    )
    assert "is one arm" in said


def test_a_server_is_named_by_http(path: Path) -> None:
    assert refusal(path, BASE + "engine: {url: 'h:1'}").startswith("engine.url: ")


@pytest.mark.parametrize("load_", ["{client: replay}", "{tape: results/x}"])
def test_a_replay_and_its_tape_go_together(path: Path, load_: str) -> None:
    assert refusal(path, BASE + f"load: {load_}").endswith("go together")


# --- YAML ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        (BASE + "model: n\n", 3, "model"),
        (BASE + "engine:\n  args:\n    dtype: a\n    dtype: b\n", 6, "dtype"),
    ],
)
def test_a_key_written_twice_is_an_error(path: Path, text: str, line: int, key: str) -> None:
    said = refusal(path, text)
    assert said == f"line {line}: not valid YAML: the key {key!r} stands twice."


@pytest.mark.parametrize(
    "text",
    [
        "model: &a m\nprompts: *a\n",
        "model: m\nprompts: [&1 p, *1]\n",
        "{model: &a m, prompts: *a}",
        "'model': &a m\nprompts: p\n",
        "model: m\nprompts: [p,*a]\n",
        "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n",
    ],
)
def test_anchors_are_refused(path: Path, text: str) -> None:
    assert refusal(path, text).endswith("anchors and aliases are not taken, write it out.")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "a config is a mapping of keys"),
        (b"- model: m\n", "a config is a mapping of keys"),
        (b"just text", "a config is a mapping of keys"),
        (b"model: caf\xe9\nprompts: p\n", "not UTF-8 text"),
        (BASE.encode("utf-16"), "not UTF-8 text"),
        (b"model: m\x00\nprompts: p\n", "not valid YAML: unacceptable character"),
        (b"model: m\n\tprompts: p\n", "line 2: not valid YAML"),
        (b"model: {a: 1\n", "line 2: not valid YAML"),
        (BASE.encode() + b"---\nmodel: x\n", "line 3: not valid YAML"),
        (BASE.encode() + b"x: !!python/name:os.system\n", "line 3: not valid YAML"),
        (BASE.encode() + b"? [a]\n: 1\n", "line 3: not valid YAML: a key must be plain text"),
        (BASE.encode() + b"x: " + b"[" * 2000, "line 3: not valid YAML: nested too deep"),
        (BASE.encode() + b"#" * 1_000_000, "over 64 kB"),
    ],
    ids=[
        *("empty", "list", "text", "latin-1", "utf-16", "nul", "tab", "unclosed"),
        *("two-documents", "python-tag", "list-as-key", "deep", "huge"),
    ],
)
def test_what_is_no_config_is_refused_in_one_line(path: Path, content: bytes, said: str) -> None:
    assert refusal(path, content).startswith(said)


def test_a_file_that_is_not_there_is_named(path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{path}: cannot be read: No such file")):
        config.load(path)


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet="mokdelprts:&*-[]{}'\"#!|>?%@ \n\t019.~é\x00", max_size=60))
def test_no_text_whatever_is_more_than_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    try:
        loaded = load(path, text)
    except ConfigError:
        return
    assert isinstance(loaded, Config)


# --- --set ---------------------------------------------------------------------------------------


def ks(loaded: Config) -> list[tuple[int, ...]]:
    return [speculation.k for speculation in loaded.speculation]


@pytest.mark.parametrize(
    "override", ["speculation.k=3", "speculation.0.k=3", " speculation . k =3"]
)
def test_set_reaches_a_method_written_alone(path: Path, override: str) -> None:
    assert ks(load(path, NGRAM, override)) == [(3,)]


def test_set_by_name_reaches_every_item_of_a_list(path: Path) -> None:
    assert ks(load(path, TWO_METHODS, "speculation.k=[3, 4]")) == [(3, 4), (3, 4)]


def test_set_by_index_reaches_one_item_of_a_list(path: Path) -> None:
    assert ks(load(path, TWO_METHODS, "speculation.1.k=4")) == [(1,), (4,)]


def test_set_replaces_a_whole_item(path: Path) -> None:
    loaded = load(path, TWO_METHODS, "speculation.0={method: ngram_gpu, k: 5}")
    assert loaded.speculation[0].method == "ngram_gpu"
    assert ks(loaded) == [(5,), (2,)]


def test_set_reaches_prompt_sets_written_as_names(path: Path) -> None:
    loaded = load(path, "model: m\nprompts: [p, q]\n", "prompts.limit=4")
    assert [(ref.set, ref.limit) for ref in loaded.prompts] == [("p", 4), ("q", 4)]


@pytest.mark.parametrize("section", ["", "sampling:\n"])
def test_set_makes_the_sections_that_are_not_there(path: Path, section: str) -> None:
    assert load(path, BASE + section, "sampling.temperature=0.5").sampling.temperature == 0.5


def test_set_is_applied_in_order(path: Path) -> None:
    assert load(path, BASE, "repeats=2", "repeats=3").repeats == 3


def test_set_keeps_an_equals_sign_in_the_value(path: Path) -> None:
    assert load(path, BASE, "description=a=b").description == "a=b"


def test_set_without_a_value_is_null(path: Path) -> None:
    assert load(path, BASE + "name: x", "name=").name is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("sampling", "--set: sampling: write KEY=VALUE"),
        ("=3", "--set: =3: write KEY=VALUE"),
        ("sampling={", "--set: sampling: '{' is not a YAML value"),
        ("sampling=&a {top_p: 1}", "--set: sampling: "),
        (f"seed={'9' * 5000}", "--set: seed: "),
        (f"seed={'[' * 2000}", "--set: seed: "),
        ("model.x=1", "--set: model.x: 'x' would lie inside a plain value"),
        ("speculation.7.k=1", "--set: speculation.7.k: item 7 is not there (items: 1)"),
        ("samplin.seed=1", "samplin: unknown key 'samplin'; did you mean 'sampling'?"),
        ("sampling..seed=1", "sampling.: unknown key ''"),
        ("speculation.-1.k=1", "speculation.0: unknown key '-1'"),
    ],
)
def test_a_bad_override_is_refused(path: Path, override: str, said: str) -> None:
    assert refusal(path, NGRAM, override).startswith(said)


# --- finding -------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    return tmp_path


@pytest.mark.parametrize("ref", ["eagle_k5", "eagle_k5.yaml"])
def test_a_bare_name_is_looked_for_in_configs_then_in_what_is_shipped(here: Path, ref: str) -> None:
    shipped = config.find(ref)
    assert shipped.resolve() == ROOT / "configs" / "eagle_k5.yaml"
    (here / "configs" / "eagle_k5.yaml").write_text(BASE, encoding="utf-8")
    assert config.find(ref).resolve() == here / "configs" / "eagle_k5.yaml"


def test_a_path_is_taken_before_any_name(here: Path) -> None:
    for place in (here / "eagle_k5.yaml", here / "configs" / "eagle_k5.yaml"):
        place.write_text(BASE, encoding="utf-8")
    assert config.find("eagle_k5.yaml").resolve() == here / "eagle_k5.yaml"


def test_a_path_is_not_looked_for_elsewhere(here: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such config file.* Did you mean eagle_k5\?"):
        config.find(str(here / "eagle_k5.yaml"))


@pytest.mark.parametrize(
    ("ref", "hint"),
    [
        ("eagel_k5", "Did you mean eagle_k5?"),
        ("qqqq", "There are: "),
        ("", "There are: "),
        ("/", "There are: "),
        ("x" * 5000, "There are: "),
        ("a\0b", "There are: "),
    ],
    ids=["misspelt", "unlike", "empty", "root", "long", "nul"],
)
def test_a_config_that_is_nowhere_says_what_there_is(here: Path, ref: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.find(ref)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(hint)


def test_an_installed_wheel_looks_in_its_own_folder_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside an installed package, `configs` is somebody else's folder."""
    package = tmp_path / "specbench"
    for folder in (package / "shipped_configs", tmp_path / "configs"):
        folder.mkdir(parents=True)
    monkeypatch.setattr("specbench.config.resources.files", lambda _: package)
    assert config.shipped_folders() == [package / "shipped_configs"]


def test_a_rate_and_a_concurrency_are_two_ways_to_send(path: Path) -> None:
    assert load(path, BASE + "rate: 2\n").rate == (2,)
    assert "write one of the two" in refusal(path, BASE + "rate: [1, 2]\nconcurrency: 4\n")
    assert "greater than 0" in refusal(path, BASE + "rate: 0\n")
    assert "precision needs pairs" in refusal(
        path, BASE + "speculation: {method: ngram, k: 2}\nrate: 1\nprecision: 0.1\n"
    )


def test_an_engine_takes_as_many_as_are_sent_at_once(path: Path) -> None:
    assert load(path, BASE + "concurrency: [1, 4]\n").in_flight == 4
    assert load(path, BASE + "rate: 2\n").in_flight == config.OPEN_LOOP_BATCH


def test_goodput_needs_a_limit(path: Path) -> None:
    limits = load(path, BASE + "goodput: {ttft_ms: 200}\n").goodput
    assert limits is not None
    assert limits.model_dump(exclude_none=True) == {"ttft_ms": 200}
    assert "needs ttft_ms, tpot_ms or latency_ms" in refusal(path, BASE + "goodput: {}\n")
    assert "did you mean 'ttft_ms'" in refusal(path, BASE + "goodput: {ttft: 200}\n")


def test_a_tools_program_goes_with_a_tool(path: Path) -> None:
    told = BASE + "load: {client: aiperf, command: /opt/aiperf}\n"
    assert load(path, told).load.is_tool
    assert "command is the program of" in refusal(path, BASE + "load: {command: /opt/aiperf}\n")


def test_a_triton_is_started_or_found(path: Path) -> None:
    started = load(path, BASE + "engine: {kind: triton, server: /opt/run tritonserver --log=1}\n")
    assert started.engine.server == ("/opt/run", "tritonserver", "--log=1")
    assert not started.is_attached
    two = "speculation: [{method: ngram, k: [1, 2]}]\n"
    found = load(path, BASE + two + "engine: {kind: triton, url: 'http://h:8000'}\n")
    assert not found.is_attached  # its models are loaded one by one, the baseline too
    both = "engine: {kind: triton, server: t, url: 'http://h:8000'}\n"
    for engine in ("engine: {kind: triton}\n", both):
        assert "one of them" in refusal(path, BASE + engine)
    assert "go with kind: triton" in refusal(path, BASE + "engine: {server: tritonserver}\n")
    asked = BASE + "engine: {kind: triton, server: t}\nload: {client: aiperf}\n"
    assert "Triton takes direct or genai-perf" in refusal(path, asked)
