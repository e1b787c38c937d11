"""Drafts: what comes out is what a run without them gives, by text, log-probabilities and what the caches hold."""

import itertools

import pytest
import torch
from hand_plans import GREEDY, Hand
from tiny_models import save_tiny_model

from hybrid_engine.groups.spec import MambaSpec, group_layers
from hybrid_engine.models.registry import load_model
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.step_plan import StepPlan
from hybrid_engine.weights import open_checkpoint

PROMPT = [(i * i * 7 + 3 * i) % 99 + 3 for i in range(29)]
NUM_DRAFTS = 3
PATTERNS = list(itertools.product(range(NUM_DRAFTS + 1), repeat=3))
"""How many drafts are right, in each of three steps."""
STATE_TOLERANCE = 1e-5
"""Float32: a chunk's sums are taken in another order than a single token's."""
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=1.3, top_p=0.95),
    "penalised": SamplingParams(
        temperature=0.7, repetition_penalty=1.3, frequency_penalty=1.0, min_tokens=8, logprobs=2, stop_token_ids=(9,)
    ),
}


SLOW_MODELS = [pytest.param("mamba2", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=["gemma3", "jamba", "bamba", *SLOW_MODELS])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(request.param, folder, initializer_range=0.1)
    return load_model(open_checkpoint(folder), dtype=torch.float32)


@pytest.fixture
def make_hand(model):
    groups = group_layers(model.info.cache_specs(block_size=4, element_bytes=4))
    return lambda num_blocks=70: Hand(model, groups, num_blocks=num_blocks)


def start(hand: Hand, request_id: str, sampling: SamplingParams = GREEDY) -> None:
    """Compute the prompt of a request and its first token."""
    hand.add(request_id, PROMPT, sampling, seed=5)
    hand.step({request_id: len(PROMPT)})


def run_plainly(hand: Hand, sampling: SamplingParams, num_tokens: int):
    """Return the tokens of a run without drafts, their log-probabilities, and what the caches hold after each step."""
    start(hand, "plain", sampling)
    logprobs, held = [], {len(PROMPT): snapshot(hand, "plain")}
    for _ in range(num_tokens):
        result = hand.step({"plain": 1})
        logprobs += result.logprobs.get("plain", ())
        held[hand.num_computed["plain"]] = snapshot(hand, "plain")
    return hand.token_ids["plain"], logprobs, held


def snapshot(hand: Hand, request_id: str) -> list[torch.Tensor]:
    """Return the working states, and the keys and values of all tokens that still have a place, layer by layer."""
    found = []
    num_computed = hand.num_computed[request_id]
    for group in hand.groups:
        table = hand.tables[request_id][group.group_id]
        for layer in group.layer_indices:
            for tensor_B in vars(hand.runner.cache.layers[layer]).values():
                if isinstance(group.spec, MambaSpec):
                    found.append(tensor_B[table[0]].clone())
                    continue
                places = [(table[i // 4], i % 4) for i in range(num_computed) if table[i // 4]]
                found.append(torch.stack([tensor_B[block, :, slot] for block, slot in places]))
    return found


def guess(right: list[int], num_right: int) -> list[int]:
    """Return drafts of which the first num_right are right, the next is wrong and the others would be right again."""
    return [(token + 1) % 259 if i == num_right else token for i, token in enumerate(right)]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_after_every_pattern_of_three_verifications_text_states_and_keys_are_those_of_a_run_without(
    make_hand, sampling
):
    tokens, logprobs, held = run_plainly(make_hand(), sampling, 13)
    hand = make_hand(1200)
    patterns = dict(zip(map(str, range(len(PATTERNS))), PATTERNS, strict=True))
    for request_id in patterns:
        hand.add(request_id, PROMPT, sampling, seed=5)
    hand.step(dict.fromkeys(patterns, len(PROMPT)))
    told: dict[str, list] = {request_id: [] for request_id in patterns}
    for step in range(3):
        known = {request_id: len(hand.token_ids[request_id]) for request_id in patterns}
        drafts = {r: guess(tokens[n : n + NUM_DRAFTS], patterns[r][step]) for r, n in known.items()}
        result = hand.step(dict.fromkeys(patterns, 1), drafts)
        for request_id, pattern in patterns.items():
            assert len(result.sampled[request_id]) == pattern[step] + 1
            told[request_id] += result.logprobs.get(request_id, ())
            for ours, plain in zip(snapshot(hand, request_id), held[hand.num_computed[request_id]], strict=True):
                torch.testing.assert_close(ours, plain, atol=STATE_TOLERANCE, rtol=STATE_TOLERANCE)
    for request_id in patterns:
        num_tokens = len(hand.token_ids[request_id])
        assert hand.token_ids[request_id] == tokens[:num_tokens]
        assert [each.token_id for each in told[request_id]] == [
            each.token_id for each in logprobs[: len(told[request_id])]
        ]
        for ours, plain in zip(told[request_id], logprobs, strict=False):
            assert ours.logprob == pytest.approx(plain.logprob, abs=1e-4)
            assert (ours.rank, len(ours.top)) == (plain.rank, 2)
    assert bool(logprobs) == (sampling.logprobs is not None)
    assert len(set(tokens[len(PROMPT) :])) > 4


def test_drafts_run_beside_prompts_and_single_tokens(make_hand):
    tokens, _, _ = run_plainly(make_hand(), GREEDY, 8)
    hand = make_hand()
    start(hand, "drafting")
    start(hand, "single")
    hand.add("prompt", PROMPT)
    drafts = {"drafting": tokens[30:33]}
    assert hand.step({"prompt": 12, "drafting": 1, "single": 1}, drafts).sampled == {
        "drafting": tuple(tokens[30:34]),
        "single": (tokens[30],),
    }
    assert hand.step({"single": 1, "prompt": 17, "drafting": 1}, {"single": [3]}).sampled == {
        "single": (tokens[31],),
        "prompt": (tokens[29],),
        "drafting": (tokens[34],),
    }


def test_drafts_may_follow_the_last_tokens_of_a_prompt(make_hand):
    tokens, _, held = run_plainly(make_hand(), GREEDY, 8)
    hand = make_hand()
    hand.add("a", PROMPT)
    hand.step({"a": 20})
    assert hand.step({"a": 9}, {"a": guess(tokens[29:32], 2)}).sampled == {"a": tuple(tokens[29:32])}
    for ours, plain in zip(snapshot(hand, "a"), held[31], strict=True):
        torch.testing.assert_close(ours, plain, atol=STATE_TOLERANCE, rtol=STATE_TOLERANCE)


def test_fewer_drafts_than_there_are_slots_for(make_hand):
    tokens, _, _ = run_plainly(make_hand(), GREEDY, 12)
    hand = make_hand()
    start(hand, "a")
    for num_drafts in (3, 1, 0, 2):
        known = len(hand.token_ids["a"])
        hand.step({"a": 1}, {"a": guess(tokens[known : known + num_drafts], 1)})
    assert hand.token_ids["a"] == tokens[: len(PROMPT) + 1 + 2 + 2 + 1 + 2]


def test_drafts_behind_an_unfinished_prompt_are_an_error(make_hand):
    hand = make_hand()
    hand.add("a", PROMPT)
    hand.step({"a": 4})
    with pytest.raises(AssertionError, match="a has drafts behind tokens not yet computed"):
        hand.runner.execute(StepPlan(1, ("a",), (4,), (3,), (False,), draft_token_ids=((1,),)))


@pytest.mark.parametrize("token_id", [-1, 259])
def test_a_draft_outside_the_vocabulary_is_an_error(make_hand, token_id):
    hand = make_hand()
    start(hand, "a")
    with pytest.raises(AssertionError, match="the vocabulary has 259"):
        hand.step({"a": 1}, {"a": [3, token_id]})
