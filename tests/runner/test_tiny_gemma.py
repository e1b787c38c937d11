"""The runner with a real architecture: a tiny random Gemma 3, its oracle transformers' own."""

import pytest
import torch
from hand_plans import Hand
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from hybrid_engine.groups.spec import group_layers
from hybrid_engine.models.registry import load_model
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.weights import open_checkpoint

PROMPT = [(i * i * 7 + 3 * i) % 99 + 1 for i in range(29)]


@pytest.fixture(scope="module")
def oracle() -> Gemma3ForCausalLM:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=100,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=10,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        max_position_embeddings=256,
        # Large, and the head not the embedding: greedy answers depend on all of the prompt, not on its last token.
        initializer_range=0.2,
        tie_word_embeddings=False,
        eos_token_id=0,
        pad_token_id=0,
    )
    return Gemma3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model(oracle, tmp_path_factory, device):
    folder = tmp_path_factory.mktemp("tiny-gemma3")
    oracle.save_pretrained(folder)
    return load_model(open_checkpoint(folder), dtype=torch.float32, device=device)


@pytest.fixture
def hand(model, device) -> Hand:
    groups = group_layers(model.info.cache_specs(block_size=4, element_bytes=4))
    return Hand(model, groups, num_blocks=100, device=device)


def greedy(oracle, prompt: list[int], num_tokens: int) -> list[int]:
    known = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            known.append(int(oracle(torch.tensor([known])).logits[0, -1].argmax()))
    return known[len(prompt) :]


@pytest.mark.parametrize("chunk", [1, 3, 7, 4096])
def test_any_chunking_gives_the_answer_of_transformers(hand, oracle, chunk):
    hand.add("a", PROMPT)
    assert hand.run({"a": 16}, chunk=chunk)["a"] == greedy(oracle, PROMPT, 16)


def test_packed_requests_each_give_the_answer_of_transformers(hand, oracle):
    hand.add("a", PROMPT)
    hand.add("b", PROMPT[11:])
    answers = hand.run({"a": 8, "b": 14}, chunk=9)
    assert answers == {"a": greedy(oracle, PROMPT, 8), "b": greedy(oracle, PROMPT[11:], 14)}
    assert len(set(answers["b"])) > 8


def test_a_preempted_request_gives_the_answer_of_transformers(hand, oracle):
    hand.add("a", PROMPT)
    hand.add("b", PROMPT[3:])
    first = hand.run({"a": 6, "b": 6})["a"]
    hand.end("a")
    hand.run({"b": 3})
    hand.add("a", PROMPT + first, num_prompt_tokens=len(PROMPT))
    assert first + hand.run({"a": 10, "b": 2}, chunk=7)["a"] == greedy(oracle, PROMPT, 16)


@pytest.mark.parametrize("chunk", [1, 5, 4096])
def test_prompt_logprobs_are_those_of_transformers(hand, oracle, chunk):
    hand.add("a", PROMPT, SamplingParams(temperature=0, prompt_logprobs=1))
    found = []
    while len(found) < len(PROMPT) - 1:
        found += hand.step({"a": min(chunk, len(PROMPT) - hand.num_computed["a"])}).prompt_logprobs["a"]
    with torch.inference_mode():
        logprobs_TV = oracle(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    expected = logprobs_TV[torch.arange(len(PROMPT) - 1), PROMPT[1:]].tolist()
    assert [each.logprob for each in found] == pytest.approx(expected, abs=1e-4)


def test_a_seeded_answer_is_the_same_alone_and_among_seven_neighbours(hand):
    sampling = SamplingParams(temperature=1.2, top_p=0.9)
    hand.add("alone", PROMPT, sampling, seed=5)
    alone = hand.run({"alone": 16})["alone"]
    hand.add("a", PROMPT, sampling, seed=5)
    for i in range(7):
        hand.add(str(i), PROMPT[i * 3 :], sampling, seed=i)
    together = hand.run({**{str(i): 10 + i for i in range(7)}, "a": 16}, chunk=5)
    assert together["a"] == alone
