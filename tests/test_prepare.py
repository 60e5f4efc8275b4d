"""What the machine has room for decides which engines are up together."""

from collections.abc import Callable
from pathlib import Path

import pytest

from specbench import config, prepare
from specbench.engines.memory import Room
from specbench.errors import ConfigError
from specbench.prompts.sets import PromptSet, prompt_set_sha256
from specbench.records import Prompt

PROMPTS = tuple(Prompt(id=f"p{i}", turns=("q",)) for i in range(3))
SET = PromptSet("he", PROMPTS, prompt_set_sha256(PROMPTS), "made up", Path("he.jsonl"), 164)


@pytest.fixture
def prepared_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., prepare.Prepared]:
    monkeypatch.setattr(prepare, "find_installation", lambda _: None)
    path = tmp_path / "c.yaml"

    def build(room: Room, *sets: str) -> prepare.Prepared:
        monkeypatch.setattr(prepare, "engines_that_fit", lambda *_, **__: room)
        text = "model: m\nprompts: he\nspeculation: {method: ngram, k: [1, 2, 3]}\n"
        path.write_text(text, encoding="utf-8")
        earlier = prepare.Earlier({"he": SET})
        parsed = config.load(path, sets)
        return prepare.prepare(
            parsed, config_path=path, prompt_folders=(), earlier=earlier, dry=True
        )

    return build


@pytest.mark.parametrize(
    ("room", "schedule", "together", "starts"),
    [
        (Room(9, "much"), "interleaved", 4, 4),
        (Room(2, "a pair"), "interleaved", 2, 6),
        (Room(1, "one"), "blocks", 1, 4),
        (Room(None, "unknown"), "blocks", 1, 4),
    ],
)
def test_auto_interleaves_where_a_pair_fits(
    prepared_with: Callable[..., prepare.Prepared],
    room: Room,
    schedule: str,
    together: int,
    starts: int,
) -> None:
    made = prepared_with(room)
    assert (made.plan.schedule, made.plan.together, made.plan.starts) == (
        schedule,
        together,
        starts,
    )
    assert made.room == room.reason


@pytest.mark.parametrize("key", ["schedule=interleaved", "precision=0.02"])
def test_pairs_that_do_not_fit_are_refused_with_the_reason(
    prepared_with: Callable[..., prepare.Prepared], key: str
) -> None:
    with pytest.raises(ConfigError, match="they do not fit: 1 engine of 70 GiB"):
        prepared_with(Room(1, "1 engine of 70 GiB fits into 80 GiB"), key)


def test_who_asks_for_pairs_gets_them_where_nobody_knows(
    prepared_with: Callable[..., prepare.Prepared],
) -> None:
    made = prepared_with(Room(None, "unknown"), "schedule=interleaved")
    assert (made.plan.schedule, made.plan.together) == ("interleaved", 2)


def test_blocks_stay_blocks(prepared_with: Callable[..., prepare.Prepared]) -> None:
    assert prepared_with(Room(9, "much"), "schedule=blocks").plan.together == 1


def test_the_size_of_the_whole_set_is_kept(
    prepared_with: Callable[..., prepare.Prepared],
) -> None:
    made = prepared_with(Room(9, "much"))
    about = prepare.document(made, config_path="c.yaml", command=[])
    assert about["prompt_sets"]["he"]["available"] == 164


def test_every_engine_gets_the_same_share_whatever_its_group(
    prepared_with: Callable[..., prepare.Prepared],
) -> None:
    launches = prepared_with(Room(2, "a pair")).launches
    plain = {
        tuple(word for word in launch.argv if "speculative" not in word and "{" not in word)
        for name, launch in launches.items()
        if name != "vanilla"
    }
    assert len(plain) == 1
