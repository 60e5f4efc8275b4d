"""The cost model recovers what requests were built from, and predicts the k between."""

import importlib.util
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specbench.analysis import cost
from specbench.analysis.cost import BestK, Choice, CostModel, Crossing, Line, NotPredictable
from specbench.analysis.metrics import acceptance_of_requests
from specbench.analysis.speedup import Key, compare
from specbench.errors import UserError
from specbench.load import sse
from specbench.records import RequestRecord, SpecRequest
from specbench.vllm_names import drafts_are_chains, recorded

DATA = Path(__file__).parent / "data"
T_AR, T_V, T_D = 7.07, 7.69, 0.74  # ms, of vLLM #20780 (shared/peers.md)
AL = {2: 2.10, 3: 2.29, 4: 2.39, 5: 2.43, 6: 2.45, 7: 2.47}
TPOT = {2: 4.37, 3: 4.29, 4: 4.48, 5: 4.71, 6: 4.94, 7: 5.20}
LEAST_VARIED, MOST_VARIED = 0.2, 0.9  # conditional acceptance of a random chain


def request(
    prompt: str, tokens: int, decode_ms: float, spec: SpecRequest | None = None, **more: object
) -> RequestRecord:
    """A request whose first chunk came after 100 ms and whose last *decode_ms* later."""
    first_ns = 100_000_000
    last_ns = first_ns + round(decode_ms * 1e6)
    facts = {
        "prompt_id": prompt,
        "sent_ns": 0,
        "end_ns": last_ns,
        "chunk_ns": (first_ns, last_ns),
        "output_tokens": tokens,
        "prompt_sha256": prompt,
        "spec": spec,
    }
    return RequestRecord.model_validate(facts | more)


def drafted(accepted: Sequence[int], k: int) -> SpecRequest:
    """vLLM's account of steps that all drafted k tokens."""
    return SpecRequest(
        drafts=len(accepted),
        draft_tokens=k * len(accepted),
        accepted=sum(accepted),
        accepted_histogram=tuple(np.bincount(accepted, minlength=k + 1).tolist()),
        per_step_accepted=tuple(accepted),
        per_step_drafted=(k,) * len(accepted),
    )


def with_length(tau: float, k: int, steps: int = 1000) -> list[int]:
    """Accepted counts of *steps* steps that emit *tau* tokens on average, none past the end."""
    total = round((tau - 1) * steps)
    return [total // steps + (i < total % steps) for i in range(steps)]


def by_key(requests: Sequence[RequestRecord]) -> dict[Key, RequestRecord]:
    return {Key(prompt_id=r.prompt_id, turn=0, repeat=0): r for r in requests}


def published() -> dict[int, dict[Key, RequestRecord]]:
    """Requests with the acceptance lengths of vLLM #20780 and step times of the line."""
    measured = {0: by_key([request("a", 1001, 1000 * T_AR)])}
    for k, tau in AL.items():
        accepted = with_length(tau, k)
        tokens = 1 + len(accepted) + sum(accepted)
        decode_ms = len(accepted) * (T_V + k * T_D)
        measured[k] = by_key([request("a", tokens, decode_ms, drafted(accepted, k))])
    return measured


def fitted(measured: cost.Measured) -> CostModel:
    model = cost.fit(measured)
    assert model is not None
    return model


# --- a drafter whose truth is known ---------------------------------------------------------------

Runs = Sequence[NDArray[np.int64]]  # by prompt: from each place, how many drafted tokens are right


def chain(rng: np.random.Generator, prompts: int, tokens: int, rates: Sequence[float]) -> Runs:
    """Each place on its own: position i is right with rates[i], if all before it were."""
    shape = (prompts, tokens + len(rates) + 1, len(rates))
    return list(np.cumprod(rng.random(shape) < np.array(rates), axis=2).sum(axis=2))


def bursty_chain(rng: np.random.Generator, prompts: int, tokens: int, deepest: int) -> Runs:
    """Easy and hard stretches of text: a place's difficulty is much like that of the one before."""
    runs = []
    for _ in range(prompts):
        length = tokens + 2 * deepest + 2
        ease = np.zeros(length)
        for place in range(1, length):
            ease[place] = 0.95 * ease[place - 1] + math.sqrt(1 - 0.95**2) * rng.normal()
        luck = rng.random(length)
        depth = np.arange(deepest)
        places = np.arange(length - deepest)[:, None] + depth
        right = luck[places] < 1 / (1 + np.exp(-(0.6 + 3 * ease[places] - 0.2 * depth)))
        runs.append(np.cumprod(right, axis=1).sum(axis=1))
    return runs


def decoded(runs: Runs, tokens: int, ks: Sequence[int]) -> dict[int, dict[Key, RequestRecord]]:
    """What each k measures on these prompts: steps from place to place, T_v + k T_d ms each."""
    measured: dict[int, dict[Key, RequestRecord]] = {
        0: by_key([request(f"{i}", tokens, (tokens - 1) * T_AR) for i in range(len(runs))])
    }
    for k in ks:
        requests = []
        for i, right in enumerate(runs):
            place, accepted = 0, []
            while place < tokens - 1:
                accepted.append(min(int(right[place]), k))
                place += 1 + accepted[-1]
            decode_ms = len(accepted) * (T_V + k * T_D)
            requests.append(request(f"{i}", tokens, decode_ms, drafted(accepted, k)))
        measured[k] = by_key(requests)
    return measured


def only(measured: cost.Measured, *ks: int) -> cost.Measured:
    return {k: measured[k] for k in ks}


# --- step time ------------------------------------------------------------------------------------


def test_a_vanilla_step_is_a_token_after_the_first() -> None:
    assert cost.step_ms(request("a", 11, 70), 0) == pytest.approx(7)


def test_tokens_in_the_first_chunk_took_no_decode_time() -> None:
    assert cost.step_ms(request("a", 11, 70, chunk_tokens=(4, 7)), 0) == pytest.approx(10)


def test_a_speculative_step_is_a_draft_however_many_tokens_were_trimmed() -> None:
    """4 steps, the last accepted 3 of which 2 lay past the end: 1 + 4 + 6 - 2 tokens."""
    trimmed = request("a", 9, 40, drafted([1, 0, 2, 3], k=3))
    assert cost.step_ms(trimmed, 3) == pytest.approx(10)


def test_steps_without_a_draft_count() -> None:
    """1 + 2 drafts + 3 accepted leaves 4 of 10 tokens to steps that drafted nothing."""
    assert cost.step_ms(request("a", 10, 60, drafted([1, 2], k=3)), 3) == pytest.approx(10)


@pytest.mark.parametrize(
    ("k", "facts"),
    [
        (3, {"spec": None}),
        (3, {"chunk_tokens": (3, 6)}),
        (3, {"output_tokens": None}),
        (3, {"chunk_ns": (5,)}),
        (3, {"chunk_ns": (5, 5)}),
        (0, {"output_tokens": 1}),
        (0, {"chunk_ns": ()}),
    ],
)
def test_a_step_whose_time_cannot_be_known_has_none(k: int, facts: dict[str, Any]) -> None:
    """No account of drafts, later steps in the first chunk, no count, no second time."""
    whole: dict[str, Any] = {"spec": drafted([1, 0, 2, 3], k=3)}
    assert cost.step_ms(request("a", 9, 40, **(whole | facts)), k) is None


def test_a_recorded_stream_of_vllm_has_the_steps_its_chunks_show() -> None:
    """17 steps after the first token made 23 tokens; each event stands for 10 ms."""
    events = (DATA / "vllm_0.32_chat_eagle_k3.sse").read_bytes().split(b"\n\n")
    answer = sse.read((10_000_000 * i, event + b"\n\n") for i, event in enumerate(events))
    recorded_request = request(
        "a",
        answer.tokens[0] or 0,
        0,
        answer.spec,
        chunk_ns=tuple(answer.chunk_ns),
        chunk_tokens=tuple(answer.chunk_tokens),
    )
    assert cost.step_ms(recorded_request, 3) == pytest.approx(10)
    vanilla = by_key([request("a", 24, 23 * 8)])
    model = fitted({0: vanilla, 3: by_key([recorded_request])})
    assert model.tau == pytest.approx({3: 23 / 17})
    assert model.speedup(3) == pytest.approx(8 / 10 * 23 / 17)


# --- the model ------------------------------------------------------------------------------------


def test_the_line_is_recovered_from_requests() -> None:
    model = fitted(published())
    assert model.vanilla_ms == pytest.approx(T_AR)
    assert model.line is not None
    assert (model.line.verify_ms, model.line.draft_ms) == pytest.approx((T_V, T_D), rel=1e-5)
    assert model.line.residual == pytest.approx(0, abs=1e-6)
    assert model.tau == pytest.approx(AL)
    assert model.verify_overhead == pytest.approx(T_V / T_AR, rel=1e-5)
    assert model.draft_cost == pytest.approx(T_D / T_AR, rel=1e-5)
    assert (model.prompts, model.requests) == (1, 1)


def test_the_published_times_per_token_come_out() -> None:
    """vLLM #20780: within the stated 0.08 ms of a step and the rounding of the published AL."""
    model = fitted(published())
    for k, tpot in TPOT.items():
        assert T_AR / model.speedup(k) == pytest.approx(tpot, abs=(0.08 + 0.005 * tpot) / AL[k])


def test_the_published_figures_lie_on_the_stated_line() -> None:
    """From TPOT and AL as published, with a residual that is not 0."""
    measured = published()
    for k, tpot in TPOT.items():
        accepted = with_length(AL[k], k)
        tokens = 1 + len(accepted) + sum(accepted)
        decode_ms = (tokens - 1) * tpot
        measured[k] = by_key([request("a", tokens, decode_ms, drafted(accepted, k))])
    line = fitted(measured).line
    assert line is not None
    assert line.verify_ms == pytest.approx(T_V, abs=0.01)
    assert line.draft_ms == pytest.approx(T_D, abs=0.01)
    assert line.residual == pytest.approx(0.082 / (AL[3] * TPOT[3]), rel=0.01)


def test_break_even_is_a_step_in_vanilla_steps() -> None:
    model = fitted(only(published(), 0, 2, 5))
    assert model.break_even(5) == pytest.approx((T_V + 5 * T_D) / T_AR)
    assert model.break_even(3) == pytest.approx((T_V + 3 * T_D) / T_AR)  # by the line


def test_one_k_has_no_line() -> None:
    model = fitted(only(published(), 0, 4))
    assert (model.line, model.verify_overhead, model.draft_cost) == (None, None, None)
    assert model.break_even(4) == pytest.approx((T_V + 4 * T_D) / T_AR)
    assert (model.step_ms_at(5), model.break_even(5)) == (None, None)


def test_two_k_have_a_line_that_nothing_speaks_for() -> None:
    line = fitted(only(published(), 0, 2, 4)).line
    assert line is not None
    assert line.residual is None


@pytest.mark.parametrize(
    "measured",
    [
        {},
        {0: by_key([request("a", 11, 70)])},
        {2: by_key([request("a", 9, 40, drafted([1, 0, 2, 3], 3))])},
        {0: by_key([request("a", 11, 70)]), 2: {}},
        {0: by_key([request("a", 11, 70)]), 3: by_key([request("a", 9, 40)])},
        {
            0: by_key([request("a", 11, 70)]),
            3: by_key([request("b", 9, 40, drafted([1, 0, 2, 3], 3))]),
        },
    ],
    ids=["nothing", "vanilla only", "no vanilla", "nothing at k", "no spec", "no common prompt"],
)
def test_without_the_facts_there_is_no_model(measured: cost.Measured) -> None:
    assert cost.fit(measured) is None


def test_a_k_without_step_counts_does_not_spoil_the_others() -> None:
    measured = published()
    measured[3] = by_key([request("a", 100, 400)])
    assert sorted(fitted(measured).step_ms) == [2, 4, 5, 6, 7]


def test_only_requests_that_every_k_answered_count() -> None:
    spec = drafted([1, 0, 2, 2], k=2)
    measured = {
        0: by_key([request("a", 11, 70), request("b", 11, 700), request("c", 11, 700)]),
        2: by_key([request("a", 10, 40, spec), request("b", 10, 400, spec, error="cut")]),
    }
    model = fitted(measured)
    assert model.vanilla_ms == pytest.approx(7)
    assert model.step_ms == pytest.approx({2: 10})
    assert (model.prompts, model.requests) == (1, 1)


def test_a_k_that_broke_off_does_not_take_the_others_down() -> None:
    spec = drafted([1, 0, 2, 2], k=2)
    names = [f"{i}" for i in range(12)]
    measured = {
        0: by_key([request(name, 11, 70) for name in names]),
        1: by_key([request(name, 10, 40, spec) for name in names]),
        2: by_key([request(name, 10, 40, spec) for name in names[:2]]),
    }
    model = fitted(measured)
    assert (set(model.step_ms), model.prompts) == ({1}, 12)


def test_a_prompt_counts_once_in_tau_however_often_it_was_sent() -> None:
    """4 tokens a step in 3 repeats of a, 1 in b: the mean of logs over prompts is 2."""
    slow, fast = drafted([0] * 8, k=3), drafted([3, 3], k=3)
    a = {Key("a", 0, repeat): request("a", 9, 20, fast) for repeat in range(3)}
    b = {Key("b", 0, 0): request("b", 9, 80, slow)}
    vanilla = {key: request(key.prompt_id, 9, 80) for key in a | b}
    model = fitted({0: vanilla, 3: a | b})
    assert model.tau[3] == pytest.approx(2)
    assert (model.prompts, model.requests) == (2, 4)
    assert model.speedup(3) == pytest.approx(2)


def test_the_expected_speedup_is_the_measured_one_where_counted_acceptance_is_not() -> None:
    """24 tokens a request at k = 5: tokens accepted past the end reach nobody."""
    measured = decoded(chain(np.random.default_rng(3), 60, 24, [0.8] * 5), 24, [5])
    model = fitted(measured)
    paired = compare(measured[0], measured[5]).tpot
    counted = acceptance_of_requests(list(measured[5].values()))
    assert paired is not None
    assert counted is not None
    assert counted.length is not None
    assert cost.disagreement(model.speedup(5), paired.value) is None
    assert model.speedup(5) == pytest.approx(paired.value)
    by_count = model.vanilla_ms * counted.length / model.step_ms[5]
    assert cost.disagreement(by_count, paired.value) is not None


def test_stalled_requests_make_the_model_disagree_with_the_pairs() -> None:
    measured = decoded(chain(np.random.default_rng(4), 20, 64, [0.7] * 3), 64, [3])
    key = Key("0", 0, 0)
    last = measured[3][key].chunk_ns[-1]
    stalled = {"chunk_ns": (100_000_000, last + 2_000_000_000), "end_ns": last + 2_000_000_000}
    measured[3][key] = measured[3][key].model_copy(update=stalled)
    paired = compare(measured[0], measured[3]).tpot
    assert paired is not None
    finding = cost.disagreement(fitted(measured).speedup(3), paired.value)
    assert finding is not None
    assert "not the same for all requests" in finding


@pytest.mark.parametrize(("expected", "agrees"), [(1.54, True), (1.46, True), (1.55, False)])
def test_agreement_has_a_tolerance(expected: float, agrees: bool) -> None:
    assert (cost.disagreement(expected, 1.5) is None) is agrees


def test_a_disagreement_says_both_figures() -> None:
    finding = cost.disagreement(1.2, 1.5)
    assert finding is not None
    assert re.search(r"1\.20, measured was 1\.50 \(-20%\)", finding)


# --- prediction -----------------------------------------------------------------------------------


def test_prediction_is_the_truth_of_an_independent_chain() -> None:
    """tau(k) = 1 + r1 + r1 r2 + ..., the speed-up T_AR tau / (T_v + k T_d): known in advance."""
    rates = [0.75, 0.65, 0.6, 0.55, 0.5]
    runs = chain(np.random.default_rng(5), 60, 512, rates)
    found = cost.predict(decoded(runs, 512, [1, 5]), "eagle3").at
    assert list(found) == [1, 2, 3, 4, 5]
    for k, predicted in found.items():
        tau = 1 + float(np.cumprod(rates)[:k].sum())
        assert predicted.tau == pytest.approx(tau, rel=0.015)
        assert predicted.step_ms == pytest.approx(T_V + k * T_D, rel=1e-4)
        assert predicted.speedup == pytest.approx(T_AR * tau / (T_V + k * T_D), rel=0.015)


@settings(max_examples=25, deadline=None)
@given(
    rates=st.lists(st.floats(LEAST_VARIED, MOST_VARIED), min_size=3, max_size=6),
    tokens=st.integers(24, 200),
    seed=st.integers(0, 2**32 - 1),
)
def test_prediction_is_what_each_k_measures(rates: list[float], tokens: int, seed: int) -> None:
    """For any chain and length of output, within the sampling error of 6,000 tokens."""
    runs = chain(np.random.default_rng(seed), 6000 // tokens, tokens, rates)
    measured = decoded(runs, tokens, range(1, len(rates) + 1))
    model = fitted(measured)
    for k, predicted in cost.predict(measured, "draft_model").at.items():
        assert predicted.tau == pytest.approx(model.tau[k], rel=0.04)
        assert predicted.speedup == pytest.approx(model.speedup(k), rel=0.04)


@pytest.mark.parametrize(("prompts", "tokens"), [(200, 24), (60, 256)])
def test_prediction_holds_where_acceptance_comes_in_bursts(prompts: int, tokens: int) -> None:
    """There 1 + p_1 + ... + p_k of k_max alone is off by more than the 5% promised."""
    measured = decoded(
        bursty_chain(np.random.default_rng(6), prompts, tokens, 5), tokens, range(1, 6)
    )
    model = fitted(measured)
    for k, predicted in cost.predict(measured, "eagle").at.items():
        assert predicted.speedup == pytest.approx(model.speedup(k), rel=0.03)
    counted = acceptance_of_requests(list(measured[5].values()))
    assert counted is not None
    assert counted.positions is not None
    assert 1 + sum(counted.positions[:2]) < 0.95 * model.tau[2]


def test_prediction_looks_at_three_k_only_and_keeps_the_ends() -> None:
    measured = decoded(chain(np.random.default_rng(7), 20, 64, [0.7] * 4), 64, [1, 2, 3, 4])
    found = cost.predict(measured, "mtp", seed=1)
    assert found == cost.predict(only(measured, 0, 1, 4), "mtp", seed=1)
    model = fitted(measured)
    for k in (1, 4):
        assert found.at[k].tau == pytest.approx(model.tau[k])
        assert found.at[k].speedup == pytest.approx(model.speedup(k))


def test_the_best_predicted_k_is_among_those_not_measured() -> None:
    """T_v + k T_d against 0.8 accepted: the speed-up is largest at k = 5 or 6 of 8."""
    measured = decoded(chain(np.random.default_rng(8), 40, 256, [0.8] * 8), 256, [1, 8])
    found = cost.predict(measured, "eagle3")
    assert found.best.k == max(found.at, key=lambda k: found.at[k].speedup)
    assert found.best.k in (5, 6)
    assert found.best.speedup == found.at[found.best.k].speedup
    assert found.best.share is not None
    assert 0.3 < found.best.share <= 1


def test_vanilla_is_best_where_no_k_pays() -> None:
    measured = decoded(chain(np.random.default_rng(9), 10, 64, [0.02] * 3), 64, [1, 3])
    found = cost.predict(measured, "eagle3")
    assert (found.best.k, found.best.speedup, found.best.share) == (0, 1, 1)


def test_methods_of_vllm_are_chains_or_refused() -> None:
    """A method that a later vLLM adds must be looked at: it appears here."""
    refused = {name for name in recorded().methods if not drafts_are_chains(name)}
    assert refused == {
        "custom_class",
        "dflash",
        "dspark",
        "extract_hidden_states",
        "medusa",
        "mlp_speculator",
        "ngram",
        "ngram_gpu",
        "suffix",
    }
    assert {"eagle", "eagle3", "draft_model", "mtp", "deepseek_mtp"} <= recorded().methods - refused


def test_a_method_without_chains_is_refused_by_name() -> None:
    measured = decoded(chain(np.random.default_rng(0), 4, 32, [0.7] * 3), 32, [1, 3])
    with pytest.raises(NotPredictable, match="ngram does not draft token after token"):
        cost.predict(measured, "ngram")


@pytest.mark.parametrize(
    ("keep", "reason"),
    [
        ((), "needs vanilla, k = 1 and a larger k"),
        ((0, 1), "needs vanilla, k = 1 and a larger k"),
        ((0, 3), "needs vanilla, k = 1 and a larger k"),
        ((1, 3), "needs vanilla, k = 1 and a larger k"),
    ],
)
def test_a_missing_measurement_is_named(keep: Sequence[int], reason: str) -> None:
    measured = decoded(chain(np.random.default_rng(0), 4, 32, [0.7] * 3), 32, [1, 3])
    with pytest.raises(NotPredictable, match=reason):
        cost.predict(only(measured, *keep), "eagle")


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (lambda spec: None, "k = 1 and k = 3 with step counts"),
        (lambda spec: spec.model_copy(update={"accepted_histogram": None}), "per position"),
        (lambda spec: drafted([], 3), "per position"),
    ],
    ids=["no spec", "no histogram", "nothing drafted"],
)
def test_unknown_acceptance_is_named(
    broken: Callable[[SpecRequest | None], SpecRequest | None], reason: str
) -> None:
    measured = decoded(chain(np.random.default_rng(0), 4, 32, [0.7] * 3), 32, [1, 3])
    for key, kept in measured[3].items():
        measured[3][key] = kept.model_copy(update={"spec": broken(kept.spec)})
    with pytest.raises(NotPredictable, match=reason):
        cost.predict(measured, "eagle")


# --- the best k -----------------------------------------------------------------------------------


def speeds(*by_prompt: Mapping[int, float]) -> dict[int, dict[Key, RequestRecord]]:
    """One request a prompt with these speed-ups by k, without step counts; vanilla 1000 ms."""
    measured: dict[int, dict[Key, RequestRecord]] = {}
    for i, of_k in enumerate(by_prompt):
        for k, speed in ({0: 1.0} | dict(of_k)).items():
            measured.setdefault(k, {})[Key(f"{i}", 0, 0)] = request(f"{i}", 11, 1000 / speed)
    return measured


def test_the_best_k_has_the_largest_geometric_mean() -> None:
    """Arithmetic would choose k = 2: 1.9 against 1.8."""
    best = cost.best_k(speeds({2: 0.8, 3: 1.8}, {2: 3.0, 3: 1.8}))
    assert best is not None
    assert (best.k, best.prompts) == (3, 2)
    assert best.speedup == pytest.approx(1.8)


def test_all_resamples_agree_where_every_prompt_does() -> None:
    best = cost.best_k(speeds(*[{1: 1.2, 2: 1.5, 3: 1.4}] * 5))
    assert best is not None
    assert (best.k, best.share) == (2, 1)


def test_the_share_is_what_theory_says() -> None:
    """Differences of logs with mean m and standard error m / 0.5: Phi(0.5) = 69% agree."""
    rng = np.random.default_rng(10)
    logs = rng.normal(0, 1, 400)
    logs = (logs - logs.mean()) / logs.std()
    logs = logs * 0.1 + 0.5 * 0.1 / math.sqrt(400)
    best = cost.best_k(speeds(*({1: 1.5 * math.exp(x), 2: 1.5} for x in logs)))
    assert best is not None
    assert best.k == 1
    assert best.share == pytest.approx(0.691, abs=0.03)


def test_vanilla_can_be_the_best() -> None:
    best = cost.best_k(speeds({1: 0.9, 2: 0.8}, {1: 1.05, 2: 0.9}))
    assert best is not None
    assert (best.k, best.speedup) == (0, 1)


def test_one_prompt_says_nothing_of_the_certainty() -> None:
    best = cost.best_k(speeds({1: 1.2}))
    assert best is not None
    assert (best.k, best.share, best.prompts) == (1, None, 1)


@pytest.mark.parametrize("keep", [(), (0,), (1, 2)])
def test_without_vanilla_or_another_k_there_is_no_best(keep: Sequence[int]) -> None:
    assert cost.best_k(only(speeds({1: 1.2, 2: 1.1}), *keep)) is None


def test_the_same_facts_give_the_same_share() -> None:
    measured = speeds({1: 1.2, 2: 1.1}, {1: 1.0, 2: 1.3}, {1: 1.3, 2: 1.2})
    backwards = {k: dict(reversed(of_k.items())) for k, of_k in reversed(measured.items())}
    assert cost.best_k(measured, seed=3) == cost.best_k(backwards, seed=3)


def test_the_rows_choice_is_kept_and_only_its_certainty_is_found() -> None:
    """k = 3 is fastest, but flagged; of the others k = 2 leads on two of three prompts."""
    measured = speeds({1: 1.2, 2: 1.3, 3: 9}, {1: 1.2, 2: 1.3, 3: 9}, {1: 1.4, 2: 1.3, 3: 9})
    best = cost.best_k(measured, choice=Choice(2, 1.31, frozenset({1, 2}), flagged=False))
    assert best is not None
    assert (best.k, best.speedup, best.prompts, best.flagged) == (2, 1.31, 3, False)
    assert best.share is not None
    assert 0.6 < best.share < 0.9
    other = cost.best_k(measured, choice=Choice(1, 1.26, frozenset({1, 2}), flagged=False))
    assert other is not None
    assert other.share == pytest.approx(1 - best.share)
    nothing = cost.best_k(only(measured, 1, 2), choice=Choice(2, 1.3, frozenset({2}), flagged=True))
    assert nothing == BestK(2, 1.3, None, 0, flagged=True)


# --- what if --------------------------------------------------------------------------------------

MODEL = CostModel(10, {1: 12, 3: 14}, {1: 1.5, 3: 2}, Line(11, 1, None), 1, 1)


def test_a_claimed_acceptance_gives_its_speedup() -> None:
    assert cost.what_if(MODEL, 2.8, 3) == pytest.approx(2)
    assert cost.what_if(MODEL, 2.6, 2) == pytest.approx(2)  # 13 ms by the line


@pytest.mark.parametrize(("tau", "k"), [(4.01, 3), (0.99, 3), (math.nan, 3), (1, 0), (1, -1)])
def test_an_acceptance_that_cannot_be_is_refused(tau: float, k: int) -> None:
    with pytest.raises(UserError, match=r"cannot be at k = .* 1 to k \+ 1 tokens"):
        cost.what_if(MODEL, tau, k)


def test_a_k_whose_step_time_is_unknown_is_refused() -> None:
    alone = CostModel(10, {3: 14}, {3: 2}, None, 1, 1)
    with pytest.raises(UserError, match=r"k = 5 is not known, only at k = 3\. Measure k = 5"):
        cost.what_if(alone, 2, 5)


def half_drafted(found: int) -> dict[int, dict[Key, RequestRecord]]:
    """100 steps of 40 tokens' worth: those with a draft take 30 ms, the others vanilla's 10."""
    measured = {0: by_key([request("a", 401, 4000)])}
    for k in (3, 5):
        spec = drafted([3] * found, k)
        tokens = 1 + 100 + 3 * found
        measured[k] = by_key([request("a", tokens, 30 * found + 10 * (100 - found), spec)])
    return measured


@pytest.mark.parametrize(
    ("method", "found", "why"),
    [
        ("ngram", 50, "ngram looks drafts up, and a step without a match has none"),
        ("ngram_gpu", 100, "ngram_gpu looks drafts up"),  # by chance each step had a match
        ("suffix", 50, "suffix looks drafts up"),
        ("custom_class", 50, "at k = 3 only 50% of the steps had a draft"),
        ("eagle", 97, "at k = 3 only 97% of the steps had a draft"),
    ],
)
def test_a_mean_of_drafted_and_undrafted_steps_tells_no_break_even(
    method: str, found: int, why: str
) -> None:
    """Half of the steps drafted: 20 ms on average, of which none took 20."""
    model = cost.fit(half_drafted(found), method=method)
    assert model is not None
    assert model.step_ms[3] == pytest.approx((30 * found + 10 * (100 - found)) / 100)
    assert model.mixed is not None
    assert model.mixed.startswith(why)
    assert (model.line, model.verify_overhead, model.draft_cost) == (None, None, None)
    assert model.break_even(3) is None
    assert model.speedup(3) > 0  # what was measured stays
    with pytest.raises(UserError, match=f"no estimate from a mean step: {why}"):
        cost.what_if(model, 2, 3)


@pytest.mark.parametrize("method", ["eagle", "medusa", "draft_model", None])
def test_where_every_step_drafts_there_is_a_break_even(method: str | None) -> None:
    model = cost.fit(half_drafted(100), method=method)
    assert model is not None
    assert model.mixed is None
    assert model.break_even(3) == pytest.approx(3)
    assert model.line is not None


# --- concurrency ----------------------------------------------------------------------------------


def test_the_crossing_lies_between_its_neighbours_by_logarithms() -> None:
    """From 2 to 1/2 between 4 and 16: half-way, at 8."""
    found = cost.crossing({16: 0.5, 1: 3, 4: 2})
    assert found is not None
    assert not found.already
    assert found.concurrency == pytest.approx(8)


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [
        ({1: 1.5, 8: 1.1}, None),
        ({}, None),
        ({1: 1.5, 8: 1.0}, Crossing(8, already=False)),
        ({2: 0.9, 8: 0.5}, Crossing(2, already=True)),
        ({2: 1.0}, Crossing(2, already=True)),
    ],
)
def test_crossings_at_the_edges(speedups: dict[int, float], expected: Crossing | None) -> None:
    assert cost.crossing(speedups) == expected


def test_a_crossing_is_told_in_words() -> None:
    assert str(Crossing(11.3137, already=False)) == "stops paying at concurrency 11.3"
    assert str(Crossing(2, already=True)) == "already no faster at concurrency 2"


def looked_up(schedule: Sequence[tuple[int, int, int]], largest_batch: int) -> dict[int, int]:
    """k by batch size as vLLM 0.32 expands a schedule, after its checks (dynamic/utils.py)."""
    assert schedule
    assert schedule[0][0] == 1
    for start, end, k in schedule:
        assert 0 < start <= end
        assert k >= 0
    for (_, end, _), (start, _, _) in itertools.pairwise(schedule):
        assert start > end
    return {
        batch: [k for start, _, k in schedule if start <= batch][-1]
        for batch in range(1, largest_batch + 1)
    }


@pytest.mark.parametrize(
    ("best", "schedule"),
    [
        ({1: 5, 4: 3, 16: 0}, [(1, 3, 5), (4, 15, 3), (16, 16, 0)]),
        ({1: 3, 2: 3, 4: 3, 8: 1}, [(1, 7, 3), (8, 8, 1)]),
        ({16: 1, 4: 2}, [(1, 15, 2), (16, 16, 1)]),
        ({8: 4}, [(1, 8, 4)]),
        ({1: 2, 2: 3, 3: 2}, [(1, 1, 2), (2, 2, 3), (3, 3, 2)]),
    ],
)
def test_the_schedule_is_what_vllm_takes(
    best: dict[int, int], schedule: list[tuple[int, int, int]]
) -> None:
    assert cost.dynamic_schedule(best) == schedule
    assert json.loads(json.dumps(schedule)) == [list(entry) for entry in schedule]


schedules = st.dictionaries(st.integers(1, 64), st.integers(0, 8), min_size=1)


@given(schedules)
def test_each_batch_size_gets_the_k_of_the_next_smaller_measured(best: dict[int, int]) -> None:
    schedule = cost.dynamic_schedule(best)
    for batch, k in looked_up(schedule, 80).items():
        lower = [concurrency for concurrency in best if concurrency <= batch]
        assert k == best[max(lower) if lower else min(best)]
    assert all(a[2] != b[2] for a, b in itertools.pairwise(schedule))
    assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(schedule))


def test_vllm_itself_reads_a_schedule_so() -> None:
    """Its own function, from its file: that needs no import of vLLM."""
    spec = importlib.util.find_spec("vllm")
    folders = spec.submodule_search_locations if spec else None
    path = Path(folders[0]) / "v1/spec_decode/dynamic/utils.py" if folders else Path("none")
    if not path.is_file():
        pytest.skip("no vLLM with dynamic speculation here")
    found: dict[str, Any] = {}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), found)
    build = found["build_dynamic_sd_schedule_lookup"]
    for best in ({1: 5, 4: 3, 16: 0}, {3: 2, 8: 4, 20: 4, 32: 1}, {2: 0}):
        schedule = cost.dynamic_schedule(best)
        expected = looked_up(schedule, 48)
        assert build(json.loads(json.dumps(schedule)), 48, 5) == [0, *expected.values()]


@pytest.mark.parametrize("best", [{}, {0: 2}, {1: -1}])
def test_no_schedule_from_nonsense(best: dict[int, int]) -> None:
    with pytest.raises(ValueError, match="no schedule"):
        cost.dynamic_schedule(best)
