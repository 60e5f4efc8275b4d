"""The training recipe, on a random target so small that all of it runs in seconds."""

import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytestmark = pytest.mark.engine  # not for an engine, but for torch, whose import takes a second

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from specbench.demo.train import (
    data,
    distill,
    draft,
    eagle,
    evaluate,
    generate,
    loop,
    prompts,
    recorded,
    workers,
)
from specbench.demo.train.target import Target, read_shape
from specbench.errors import ToolError, UserError

HIDDEN, INTERMEDIATE, VOCAB, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 64, 96, 3, 4, 2, 8
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
}
LAYER_SHAPES = {
    "input_layernorm": (HIDDEN,),
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "post_attention_layernorm": (HIDDEN,),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
CHAT = generate.ChatTokens(end_of_turn=2, end_of_text=0, open_answer=(5, 6, 7))
POSITIONS = 64


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("target")
    draw = torch.Generator().manual_seed(7)
    shapes = {"embed_tokens": (VOCAB, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in LAYER_SHAPES.items()}
    weights = {
        f"model.{name}.weight": torch.randn(shape, generator=draw) * 0.3 + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    save_file(weights, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Target:
    return Target.load(target_folder, POSITIONS)


@pytest.fixture(scope="module")
def waves(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two waves whose held-out sequences do not use up all there is."""
    folder: Path = tmp_path_factory.mktemp("waves")
    asked = [prompt(ids=(9 + number, 10, 11), max_new=45) for number in range(64)]
    generate.generate_waves(target, CHAT, asked, folder, wave_size=32, say=silent)
    return folder


def silent(_line: str) -> None:
    pass


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Equal but for the order of fp32 additions."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def assert_same_examples(found: list[data.Example], expected: list[data.Example]) -> None:
    """Equal but for the order of fp32 additions in their states."""
    for one, other in zip(found, expected, strict=True):
        assert (one.kind, one.tokens.tolist()) == (other.kind, other.tokens.tolist())
        assert one.own.tolist() == other.own.tolist()
        torch.testing.assert_close(one.hidden, other.hidden, rtol=0.02, atol=0.02)


def prompt(
    *, ids: tuple[int, ...], max_new: int, magpie: bool = False, temp: float = 1.0
) -> prompts.TrainingPrompt:
    return prompts.TrainingPrompt("code_raw", ids, magpie, temp, max_new)


def example(tokens: list[int], own: list[bool], hidden: Tensor | None = None) -> data.Example:
    states = torch.zeros(len(tokens), HIDDEN) if hidden is None else hidden
    return data.Example(torch.tensor(tokens), torch.tensor(own), states.bfloat16(), "code_raw")


def fixed_batch(waves: Path) -> data.Batch:
    return data.collate(data.TrainingData(waves).train[:8], prompt_share=0.0)


# ---- target


def test_stepping_with_caches_gives_the_states_of_a_full_forward(target: Target) -> None:
    tokens = torch.randint(0, VOCAB, (5, 60), generator=torch.Generator().manual_seed(1))
    # The texts' indices and known tokens in each cache; more steps than a cache has room for.
    known = [{0: 4, 1: 9, 2: 6}, {3: 5, 4: 5}]
    caches = []
    lengths: dict[int, int] = {}
    for texts in known:
        cache, states = target.begin([tokens[text, :size].tolist() for text, size in texts.items()])
        for (text, size), found in zip(texts.items(), states, strict=True):
            assert_near(found, target.forward(tokens[text, None, :size])[0])
        caches.append(cache)
        lengths |= texts
    order = list(lengths)
    for step in range(50):
        if step == 20:  # the last text of a cache takes the place of the one that is dropped
            caches[0].drop(0)
            order = [2, 1, 3, 4]
        fed = torch.stack([tokens[text, lengths[text]] for text in order])
        states = target.step(fed, caches)
        for text, state in zip(order, states, strict=True):
            lengths[text] += 1
            assert_near(state, target.forward(tokens[text, None, : lengths[text]])[0, -1])


def test_a_target_that_this_code_would_run_wrongly_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": False}))
    with pytest.raises(UserError, match="an untied output embedding"):
        read_shape(tmp_path)


# ---- prompts


def test_a_prompt_that_shares_ten_words_with_an_evaluation_text_is_dropped() -> None:
    judged = "Return the list of numbers, sorted by how often each of them occurs in it."
    shares_ten = "Please:\n return THE list of numbers sorted by how often each -- then stop"
    shares_nine = "Please:\n return THE list of numbers sorted by how often one -- then stop"
    kept = prompts.without_overlap(
        [prompts.PromptText("code_raw", text) for text in (shares_ten, shares_nine)], [judged]
    )
    assert [one.text for one in kept] == [shares_nine]


def test_functions_with_doctests_come_first_and_evaluation_sets_are_not_read(
    tmp_path: Path,
) -> None:
    source = (
        'def {name}(n):\n    """{doc} and a docstring of more than forty characters."""\n    1\n'
    )
    (tmp_path / "plain.py").write_text(source.format(name="plain", doc="Plain"))
    (tmp_path / "tested.py").write_text(source.format(name="tested", doc=">>> tested(1)"))
    (tmp_path / "human_eval.py").write_text(source.format(name="judged", doc="Judged"))
    (tmp_path / "broken.py").write_text("def broken(:")
    heads = prompts.documented_functions([tmp_path], random.Random(0), most=10)
    assert [next(n for n in ("tested", "plain") if f"def {n}" in head) for head in heads] == [
        "tested",
        "plain",
    ]
    assert all(head.endswith('"""\n') for head in heads)  # cut before the body


def test_the_same_seed_gives_the_same_prompts_and_long_ones_are_left_out() -> None:
    chat = prompts.ChatFormat("<user>", "<assistant>")
    mix = prompts.Mix(functions_raw=1, functions_chat=1, self_named=2, self_asked=3)

    def build(seed: int) -> list[prompts.TrainingPrompt]:
        rng = random.Random(seed)
        texts = prompts.prompt_texts(["def f(): ...", "long " * 400], chat, mix, rng)
        return prompts.tokenized(texts, lambda text: [len(word) for word in text.split(" ")], rng)

    built = build(3)
    assert built == build(3) != build(4)
    assert max(len(one.ids) for one in built) <= prompts.LONGEST_PROMPT
    kinds = [one.kind for one in built]
    assert kinds.count("code_raw") + kinds.count("code_chat") == 1  # the other is the long one
    assert [one.magpie for one in built].count(True) == kinds.count("chat_magpie") == 3


def test_prompts_read_back_as_they_were_written(tmp_path: Path) -> None:
    written = [prompt(ids=(1, 2), max_new=5), prompt(ids=(3,), max_new=6, magpie=True)]
    prompts.write_prompts(tmp_path / "prompts.json", written)
    assert prompts.read_prompts(tmp_path / "prompts.json") == written


# ---- generate and data


def test_a_wave_holds_the_greedy_answers_and_their_states(target: Target, tmp_path: Path) -> None:
    asked = [prompt(ids=ids, max_new=20, temp=0.0) for ids in ((8, 9), (10, 11, 12, 13), (14,))]
    generate.generate_waves(target, CHAT, asked, tmp_path, wave_size=3, say=silent)
    recorded = data.read_wave(tmp_path / "w000_3.safetensors")
    for one, written in zip(asked, recorded, strict=True):
        known = len(one.ids)
        assert written.tokens[:known].tolist() == list(one.ids)
        assert written.own.tolist() == [False] * known + [True] * (len(written.tokens) - known)
        assert len(written.tokens) == known + 20 or written.tokens[-1] in CHAT.ends
        states = target.forward(written.tokens[None])[0]
        torch.testing.assert_close(written.hidden.float(), states, rtol=0.02, atol=0.02)
        choices = target.logits(states).argmax(-1)
        assert choices[known - 1 : -1].tolist() == written.tokens[known:].tolist()


def test_a_self_asked_sequence_owns_both_turns_but_not_the_header_between(
    target: Target, tmp_path: Path
) -> None:
    asked = [prompt(ids=(20 + number,), max_new=8, magpie=True) for number in range(12)]
    generate.generate_waves(target, CHAT, asked, tmp_path, wave_size=12, say=silent)
    answered = 0
    for written in data.read_wave(tmp_path / "w000_12.safetensors"):
        tokens, own = written.tokens.tolist(), written.own.tolist()
        assert own[0] is False
        end = next((place for place, token in enumerate(tokens) if token == 2), None)
        if end is None or end + 4 >= len(tokens):
            continue  # no room was left for an answer
        answered += 1
        assert all(own[1:end])
        assert tokens[end + 1 : end + 4] == [5, 6, 7]
        assert own[end + 1 : end + 4] == [False] * 3
        assert all(own[end + 4 :])
        assert len(own[end + 4 :]) <= 8
    assert answered


def test_two_processes_share_the_waves_and_skip_what_is_there(
    target: Target, tmp_path: Path
) -> None:
    asked = [prompt(ids=(8, number), max_new=4) for number in range(20)]

    def share(first: int) -> list[str]:
        said: list[str] = []
        generate.generate_waves(
            target, CHAT, asked, tmp_path, wave_size=4, first=first, stride=2, say=said.append
        )
        return said

    share(0)
    assert [path.name for path in data.wave_paths(tmp_path)] == [
        f"w00{number}_4.safetensors" for number in (0, 2, 4)
    ]
    before = data.read_wave(tmp_path / "w002_4.safetensors")
    assert all("there already" in line for line in share(0))
    share(1)
    assert len(data.wave_paths(tmp_path)) == 5
    (tmp_path / "w002_4.safetensors").unlink()
    share(0)
    assert_same_examples(data.read_wave(tmp_path / "w002_4.safetensors"), before)


@pytest.mark.parametrize("slots", [1, 3, 7, 40])
def test_a_sequence_is_the_same_in_any_slot_and_company(
    target: Target, tmp_path: Path, slots: int
) -> None:
    asked = [
        prompt(
            ids=tuple(range(8, 9 + number % 5)),
            max_new=4 + number % 11,
            magpie=number % 3 == 0,
            temp=float(number % 2),
        )
        for number in range(20)
    ]

    def waves(folder: str, slots: int) -> list[data.Example]:
        out = tmp_path / folder
        generate.generate_waves(target, CHAT, asked, out, wave_size=5, slots=slots, say=silent)
        return [one for path in data.wave_paths(out) for one in data.read_wave(path)]

    found = waves("found", slots)
    assert len(found) == len(asked)
    assert_same_examples(found, waves("all at once", len(asked)))


def test_no_wave_is_begun_after_the_time_is_up(target: Target, tmp_path: Path) -> None:
    ticks = iter(range(0, 1000, 10))
    generate.generate_waves(
        target,
        CHAT,
        [prompt(ids=(8,), max_new=2) for _ in range(8)],
        tmp_path,
        wave_size=2,
        seconds=15,
        say=silent,
        clock=lambda: next(ticks),
    )
    assert len(data.wave_paths(tmp_path)) == 1


def test_only_the_first_sequences_of_the_first_two_waves_are_held_out(tmp_path: Path) -> None:
    def long(mark: int) -> data.Example:
        return example([mark] * data.SHORTEST, [True] * data.SHORTEST)

    short = example([1] * (data.SHORTEST - 1), [True] * (data.SHORTEST - 1))
    for number in range(3):
        path = tmp_path / data.wave_name(number, 30)
        data.write_wave(path, [short, *(long(number) for _ in range(29))])
    read = data.TrainingData(tmp_path)
    assert [int(one.tokens[0]) for one in read.held_out] == [0] * 23 + [1] * 23
    assert [int(one.tokens[0]) for one in read.train] == [0] * 6 + [1] * 6 + [2] * 29


def test_new_waves_are_found_while_training_and_least_used_sequences_come_first(
    tmp_path: Path,
) -> None:
    rng = random.Random(0)
    size = data.SHORTEST
    data.write_wave(tmp_path / data.wave_name(2, 2), [example([1] * size, [True] * size)] * 2)
    read = data.TrainingData(tmp_path)
    assert len(read.least_used(2 * size, size, rng)) == 2
    data.write_wave(tmp_path / data.wave_name(3, 2), [example([2] * size, [True] * size)] * 2)
    assert read.refresh() == 1
    picked = read.least_used(2 * size, size, rng)
    assert [int(one.tokens[0]) for batch in picked for one in batch] == [2, 2]


def test_padding_and_prompts_are_not_learnt_unless_asked() -> None:
    short = example([1, 2, 3, 4, 5, 6], [False, False, False, True, True, True])
    long = example([1] * 8, [False] * 8)
    batch = data.collate([short, long], prompt_share=0.0)
    assert batch.learn.tolist() == [
        [False, False, True, True, True, False, False, False],  # from p, the token p + 1
        [False] * 8,
    ]
    everything = data.collate([short, long], prompt_share=1.0).learn.int().tolist()
    assert everything == [[0, 0, 1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 0]]


# ---- distill


def test_the_closed_form_gradient_is_autograds() -> None:
    draw = torch.Generator().manual_seed(2)
    embedding = torch.randn(VOCAB, HIDDEN, generator=draw)
    sampler = distill.CandidateSampler(embedding, torch.arange(40), negatives=20)
    candidates = sampler.draw(torch.tensor([1, 60, 61]))
    student = torch.randn(30, HIDDEN, generator=draw, requires_grad=True)
    teacher = torch.randn(30, HIDDEN, generator=draw)
    loss, _ = distill.distillation_loss(student, teacher, candidates, soft=0.7)
    (3 * loss).backward()
    closed = student.grad

    plain = student.detach().clone().requires_grad_()
    log_shares = functional.log_softmax(candidates.logits(plain), -1)
    wanted = candidates.logits(teacher)
    soft = -(wanted.softmax(-1) * log_shares).sum(-1).mean()
    hard = functional.nll_loss(log_shares, wanted.argmax(-1))
    expected = 0.7 * soft + 0.3 * hard
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(closed, plain.grad)


def test_rare_tokens_of_the_batch_are_candidates_and_sampled_ones_are_corrected() -> None:
    embedding = torch.eye(VOCAB)
    sampler = distill.CandidateSampler(embedding, torch.arange(40), negatives=20)
    candidates = sampler.draw(torch.tensor([[1, 60], [61, 60]]))
    ids = candidates.weight.argmax(-1)
    assert ids[:42].tolist() == [*range(40), 60, 61]
    assert not torch.isin(ids[42:], torch.tensor([60, 61])).any()
    assert candidates.correction[:42].abs().max() == 0
    expected = math.log((VOCAB - 40) / (len(ids) - 42))
    torch.testing.assert_close(candidates.correction[42:], torch.full((len(ids) - 42,), expected))


def test_a_vocabulary_without_rare_tokens_needs_no_samples() -> None:
    sampler = distill.CandidateSampler(torch.eye(8), torch.arange(8), negatives=20)
    assert sampler.draw().weight.shape == (8, 8)


def test_orthogonalized_brings_singular_values_near_one() -> None:
    matrix = torch.randn(24, 16, generator=torch.Generator().manual_seed(3))
    values = torch.linalg.svdvals(distill.orthogonalized(matrix))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_the_learning_rate_warms_up_and_falls_to_its_floor() -> None:
    rates = [distill.learning_rate(progress, 1.0) for progress in (0.0, 0.02, 0.04, 0.5, 1.0)]
    assert 0 < rates[0] < rates[1] < rates[2] == 1.0
    assert rates[2] > rates[3] > rates[4] == pytest.approx(distill.RATE_FLOOR)


# ---- eagle


HEAD_SHAPES = {
    "fc.weight": (HIDDEN, 2 * HIDDEN),
    "layers.0.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    "layers.0.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
    "layers.0.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
    "layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    "layers.0.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
    "layers.0.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
}


@pytest.fixture
def head(target_folder: Path, target: Target) -> eagle.Head:
    torch.manual_seed(0)
    made = eagle.Head(read_shape(target_folder), target.embedding)
    with torch.no_grad():  # large enough that attention matters
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    made.eval()
    return made


def drafted_one_by_one(head: eagle.Head, tokens: Tensor, hidden: Tensor, last: int) -> list[Tensor]:
    """What an engine computes that knows *hidden* up to position *last* and drafts three tokens.

    One position at a time, in plain formulas, with a growing list of keys and values.
    """
    weights = {name: value for name, value in head.state_dict().items()}
    attention = {kind: weights[f"layers.0.self_attn.{kind}_proj.weight"] for kind in "qkvo"}
    mlp = {kind: weights[f"layers.0.mlp.{kind}_proj.weight"] for kind in ("gate", "up", "down")}
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def rotated(vector: Tensor, position: int) -> Tensor:
        half = HEAD_DIM // 2
        turned = torch.empty_like(vector)
        for pair in range(half):
            angle = position / 10000.0 ** (2 * pair / HEAD_DIM)
            x, y = vector[:, pair], vector[:, pair + half]
            turned[:, pair] = x * math.cos(angle) - y * math.sin(angle)
            turned[:, pair + half] = y * math.cos(angle) + x * math.sin(angle)
        return turned

    def output_at(position: int, state: Tensor) -> Tensor:
        embedded = head.embedding[tokens[position + 1]]
        joined = weights["fc.weight"] @ torch.cat([embedded, state])
        query = rotated((attention["q"] @ joined).view(HEADS, HEAD_DIM), position)
        keys.append(rotated((attention["k"] @ joined).view(KV_HEADS, HEAD_DIM), position))
        values.append((attention["v"] @ joined).view(KV_HEADS, HEAD_DIM))
        attended = []
        for number in range(HEADS):
            shared = number * KV_HEADS // HEADS
            scores = torch.stack([query[number] @ key[shared] for key in keys])
            shares = (scores / HEAD_DIM**0.5).softmax(0)
            pairs = zip(shares, values, strict=True)
            attended.append(sum(share * value[shared] for share, value in pairs))
        joined = joined + attention["o"] @ torch.cat(attended)
        scale = (joined.pow(2).mean() + 1e-5).rsqrt()
        normed = joined * scale * weights["layers.0.post_attention_layernorm.weight"]
        active = functional.silu(mlp["gate"] @ normed) * (mlp["up"] @ normed)
        return joined + mlp["down"] @ active

    outputs = [output_at(position, hidden[position]) for position in range(last + 1)]
    for position in (last + 1, last + 2):
        outputs.append(output_at(position, outputs[-1]))
    return outputs[-3:]


@pytest.mark.parametrize("last", [0, 1, 5])
def test_unrolled_steps_equal_drafting_one_position_at_a_time(head: eagle.Head, last: int) -> None:
    draw = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, VOCAB, (10,), generator=draw)
    hidden = torch.randn(10, HIDDEN, generator=draw)
    with torch.no_grad():
        unrolled = head.unroll(tokens[None], hidden[None], steps=3)
        drafted = drafted_one_by_one(head, tokens, hidden, last)
    for step in range(3):
        assert_near(unrolled[step][0, last + step], drafted[step])


def test_a_saved_head_has_the_names_and_shapes_that_vllm_loads(
    head: eagle.Head, target_folder: Path, tmp_path: Path
) -> None:
    eagle.save_head(head, tmp_path, target_folder)
    saved = load_file(str(tmp_path / "model.safetensors"))
    assert {name: tuple(value.shape) for name, value in saved.items()} == HEAD_SHAPES
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config == {**CONFIG, "num_hidden_layers": 1}


def test_a_head_loads_as_it_was_saved(
    head: eagle.Head, target_folder: Path, tmp_path: Path
) -> None:
    eagle.save_head(head, tmp_path, target_folder)
    loaded = eagle.load_head(tmp_path, target_folder).state_dict()
    for name, value in head.state_dict().items():
        torch.testing.assert_close(loaded[name], value.bfloat16().float(), rtol=0, atol=0)


def test_a_folder_that_holds_no_head_is_named(target_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path} holds no EAGLE head"):
        eagle.load_head(tmp_path, target_folder)


def test_an_average_is_the_mean_of_the_weights(
    head: eagle.Head, target_folder: Path, tmp_path: Path
) -> None:
    eagle.save_head(head, tmp_path / "one", target_folder)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(-3)
    eagle.save_head(head, tmp_path / "other", target_folder)
    folders = [tmp_path / "one", tmp_path / "other"]
    eagle.average_heads(folders, tmp_path / "mean", target_folder)
    one, mean = (
        load_file(str(tmp_path / name / "model.safetensors"))["fc.weight"].float()
        for name in ("one", "mean")
    )
    torch.testing.assert_close(mean, -one, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize(
    ("progress", "cold", "warm"), [(0.0, 1, 2), (0.39, 1, 2), (0.5, 2, 3), (0.7, 3, 3)]
)
def test_more_steps_are_unrolled_as_training_goes_on(progress: float, cold: int, warm: int) -> None:
    options = eagle.HeadOptions()
    assert options.unroll_steps(progress, warm=False) == cold
    assert options.unroll_steps(progress, warm=True) == warm


def test_training_a_head_lowers_its_loss(waves: Path, target_folder: Path, tmp_path: Path) -> None:
    options = eagle.HeadOptions(dropout=0.0, feature_noise=0.0, batch_tokens=400)
    batch = fixed_batch(waves)

    def loss_of(head: eagle.Head) -> float:
        everything = distill.Candidates(head.embedding, torch.zeros(VOCAB))
        with torch.no_grad():
            loss, _ = eagle.head_loss(head, batch, everything, 1, options, warm=False)
        return float(loss)

    def train(steps: int, init: Path | None = None) -> eagle.Head:
        return eagle.train_head(
            target=target_folder,
            data=waves,
            out=tmp_path / "head",
            seconds=60,
            max_steps=steps,
            init=init,
            options=options,
            say=silent,
        )

    untrained, trained = loss_of(train(0)), loss_of(train(10))
    assert trained < untrained
    assert loss_of(eagle.load_head(tmp_path / "head", target_folder)) == pytest.approx(
        trained, rel=0.01
    )
    assert loop.finished_path(tmp_path / "head").exists()
    assert loss_of(train(10, init=tmp_path / "head")) < trained


# ---- draft


def test_training_a_draft_lowers_its_loss(waves: Path, target_folder: Path, tmp_path: Path) -> None:
    batch = fixed_batch(waves)

    def loss_of(model: draft.DraftModel) -> float:
        everything = distill.Candidates(model.embedding, torch.zeros(VOCAB))
        with torch.no_grad():
            return float(draft.draft_loss(model, batch, everything)[0])

    trained = draft.train_draft(
        target=target_folder,
        data=waves,
        out=tmp_path / "delta",
        seconds=60,
        max_steps=10,
        options=draft.DraftOptions(batch_tokens=400),
        say=silent,
    )
    assert loss_of(trained) < loss_of(draft.new_draft(target_folder, 2))


def test_a_draft_begins_as_the_targets_first_and_last_layers(target_folder: Path) -> None:
    source = load_file(str(target_folder / "model.safetensors"))
    begun = draft.new_draft(target_folder, 2).state_dict()
    for name in LAYER_SHAPES:
        for index, layer in enumerate((0, LAYERS - 1)):
            expected = source[f"model.layers.{layer}.{name}.weight"]
            assert torch.equal(begun[f"layers.{index}.{name}.weight"], expected)
    assert torch.equal(begun["norm.weight"], source["model.norm.weight"])


def test_a_draft_of_all_layers_is_the_target(target: Target, target_folder: Path) -> None:
    tokens = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        states = draft.new_draft(target_folder, LAYERS)(tokens)
    assert_near(states, target.forward(tokens))


def test_a_delta_loads_as_it_was_saved_and_holds_no_embedding(
    target_folder: Path, tmp_path: Path
) -> None:
    model = draft.new_draft(target_folder, 2)
    draft.save_delta(model, tmp_path, target_folder)
    names = set(load_file(str(tmp_path / "model.safetensors")))
    layers = {f"model.layers.{index}.{name}.weight" for index in (0, 1) for name in LAYER_SHAPES}
    assert names == {*layers, "model.norm.weight"}
    loaded = draft.load_delta(tmp_path, target_folder).state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(loaded[name], value.bfloat16().float(), rtol=0, atol=0)


# ---- loop


def test_an_interrupted_run_is_taken_up_where_it_was_saved(tmp_path: Path) -> None:
    checkpoint = tmp_path / "model.checkpoint.pt"
    goal = torch.ones(4)
    nothing = distill.Candidates(goal, goal)
    batch = data.Batch(torch.zeros(1, 3), goal, goal)

    def run(say: loop.Say, seconds_per_look: float) -> nn.Linear:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)

        def endless() -> Iterator[tuple[data.Batch, distill.Candidates]]:
            while True:
                yield batch, nothing

        task = loop.Task(
            batches=endless(),
            loss=lambda _batch, _candidates, _progress: (
                functional.mse_loss(model(goal), goal),
                {"loss": 0.0},
            ),
            save=lambda: None,
            report=lambda: "fine",
            peak_rate=0.01,
        )
        seconds = iter(range(10**6))
        clock = lambda: next(seconds) * seconds_per_look
        loop.train(model, task, loop.Budget(1e9, 25), checkpoint, say=say, clock=clock)
        return model

    def interrupt_at_20(line: str) -> None:
        if line.startswith("step 20 "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(interrupt_at_20, seconds_per_look=loop.SAVE_EVERY_S)
    said: list[str] = []
    again = run(said.append, seconds_per_look=0.0)
    assert said[0].startswith("going on after 19 steps")
    assert not checkpoint.exists()
    torch.testing.assert_close(again.weight, run(silent, seconds_per_look=0.0).weight)


@pytest.mark.parametrize(
    ("seconds", "steps", "spent"), [(30.0, 0, 0.5), (0.0, 3, 0.75), (60.0, 1, 1.0)]
)
def test_a_budget_ends_by_time_or_steps_whichever_is_first(
    seconds: float, steps: int, spent: float
) -> None:
    assert loop.Budget(60, 4).spent(seconds, steps) == spent


# ---- evaluate


class Scripted:
    """A drafter whose s-th step proposes what a table says."""

    embedding = torch.eye(VOCAB)

    def __init__(self, proposals: list[list[int]]) -> None:
        self.proposals = proposals

    def proposing_states(self, tokens: Tensor, hidden: Tensor, steps: int) -> list[Tensor]:
        return [self.embedding[torch.tensor(row)] for row in self.proposals[:steps]]


def test_acceptance_lengths_are_those_computed_by_hand() -> None:
    # Prompt 1 2, answer 3 .. 11. Token 3 comes with the prompt; tokens 4 .. 11 can be drafted.
    text = example([*range(1, 12)], [False] * 2 + [True] * 9)
    first = [0, 0, 0, 4, 0, 6, 7, 0, 9, 10, 11]  # by place; right where it equals the text
    second = [0, 0, 0, 0, 5, 0, 7, 0, 0, 10, 11]
    found = evaluate.acceptance_by_kind(Scripted([first, second]), [text], longest=2)
    by_one, by_two = found["code_raw"]
    # k=1: 4 accepted, so 4 5; 6, so 6 7; 8 refused, so 8; 9, so 9 10. A draft of 11 would end
    # the text and is not begun.
    assert (by_one.target_steps, by_one.tokens, by_one.accepted_at) == (4, 7, (3,))
    assert by_one.length == 7 / 4
    # k=2: 4 5 accepted, so 4 5 6; 7 accepted and 8 refused, so 7 8; 9 10 accepted, so 9 10 11.
    assert (by_two.target_steps, by_two.tokens, by_two.accepted_at) == (3, 8, (3, 2))
    assert by_two.length == 8 / 3
    assert by_two.rates == (1.0, 2 / 3)


def test_texts_that_are_too_short_to_judge_are_left_out() -> None:
    short = example([1, 2, 3, 4], [False, False, True, True])
    assert evaluate.acceptance_by_kind(Scripted([[0] * 4]), [short], longest=1) == {}


def test_a_draft_that_is_the_target_is_always_right(target: Target, target_folder: Path) -> None:
    tokens = [8, 9]
    while len(tokens) < 30:
        states = target.forward(torch.tensor([tokens]))[0]
        tokens.append(int(target.logits(states[-1]).argmax()))
    text = example(tokens, [False] * 2 + [True] * 28, target.forward(torch.tensor([tokens]))[0])
    model = draft.new_draft(target_folder, LAYERS)
    for acceptance in evaluate.acceptance_by_kind(model, [text])["code_raw"]:
        assert acceptance.length == acceptance.k + 1


# ---- workers


def worker(tmp_path: Path, code: str) -> workers.Worker:
    return workers.Worker("w", (sys.executable, "-I", "-c", code), tmp_path / "logs" / "w.log")


def no_wait(_seconds: float) -> None:
    time.sleep(0.01)


def test_workers_are_heard_and_awaited(tmp_path: Path) -> None:
    said: list[str] = []
    workers.run_together([worker(tmp_path, "print('hello')")], say=said.append, sleep=no_wait)
    assert said == ["[w] hello"]


def test_an_interrupt_stops_the_workers(tmp_path: Path) -> None:
    said: list[str] = []
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"

    def interrupt(_seconds: float) -> None:
        if said:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        workers.run_together([worker(tmp_path, code)], say=said.append, sleep=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(said[0].split()[-1]), 0)


def test_a_worker_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="w ended with 3: no room"):
        workers.run_together(
            [worker(tmp_path, "print('no room'); exit(3)")], say=silent, sleep=no_wait
        )


# --- recorded texts ------------------------------------------------------------------------------


def test_recorded_texts_get_the_states_back_that_they_were_generated_with(
    target: Target, tmp_path: Path
) -> None:
    asked = [
        prompts.TrainingPrompt("chat_tmpl", (9, 8, 7, n), False, 0.0, 6 + n) for n in range(5)
    ] + [
        prompts.TrainingPrompt("code_raw", (9, 8, 3), False, 0.0, 6),
        prompts.TrainingPrompt("chat_magpie", (4,), True, 0.0, 8),
    ]
    generate.generate_waves(target, CHAT, asked, tmp_path / "new", wave_size=9)
    (wave,) = data.wave_paths(tmp_path / "new")
    first = [one for one in data.read_wave(wave) if one.kind != "code_raw"]
    assert recorded.keep(tmp_path / "tokens.npz", data.read_wave(wave)) == len(first) == 6

    texts = recorded.read(tmp_path / "tokens.npz")
    recorded.recall(target, texts, tmp_path / "old", wave_size=4)
    again = [one for path in data.wave_paths(tmp_path / "old") for one in data.read_wave(path)]
    for before, after in zip(first, again, strict=True):
        assert before.kind == after.kind
        assert torch.equal(before.tokens, after.tokens)
        assert torch.equal(before.own, after.own)
        assert torch.allclose(before.hidden.float(), after.hidden.float(), atol=0.05, rtol=0.02)
    said: list[str] = []
    assert recorded.recall(target, texts, tmp_path / "old", wave_size=4, say=said.append) == 0
    assert said == ["wave 500: there already", "wave 501: there already"]


def test_the_texts_that_ship_are_chats_of_the_demos_target() -> None:
    texts = recorded.read()
    assert {one.kind for one in texts} == {"chat_magpie", "chat_tmpl"}
    assert max(int(one.tokens.max()) for one in texts) < 49152
    assert max(len(one.tokens) for one in texts) <= generate.POSITIONS
    own = sum(int(one.own.sum()) for one in texts)
    assert 0.5 < own / sum(len(one.tokens) for one in texts) < 1


def test_a_file_of_something_else_is_no_recorded_text(tmp_path: Path) -> None:
    (tmp_path / "tokens.npz").write_bytes(b"no zip")
    with pytest.raises(UserError, match="holds no recorded texts"):
        recorded.read(tmp_path / "tokens.npz")
