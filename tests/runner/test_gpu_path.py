"""What a GPU runs, in Triton's interpreter on tensors of the CPU: whole models, and decode steps filled up."""

from types import SimpleNamespace

import pytest
import torch
from hand_plans import Hand
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from hybrid_engine.groups.spec import group_layers
from hybrid_engine.models.base import LayerInfo
from hybrid_engine.models.registry import load_model
from hybrid_engine.runner.batch import DecodeShape
from hybrid_engine.runner.graphs import Decoded, DecodeGraphs, can_be_recorded
from hybrid_engine.runner.sampler import greedy_tokens
from hybrid_engine.weights import open_checkpoint

PROMPT = [(i * i * 7 + 3 * i) % 99 + 1 for i in range(21)]
COMMON = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,  # large: greedy answers depend on all of the prompt
    "eos_token_id": 0,
    "pad_token_id": 0,
}
BAMBA = BambaConfig(
    **COMMON, num_hidden_layers=3, attn_layer_indices=[1], mamba_n_heads=6, mamba_n_groups=2, mamba_d_state=5
)
GEMMA = Gemma3TextConfig(
    **COMMON,
    num_hidden_layers=2,
    head_dim=16,
    sliding_window=10,
    layer_types=["sliding_attention", "full_attention"],
    tie_word_embeddings=False,
)
QWEN = Qwen3_5TextConfig(
    **COMMON,
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    head_dim=16,
    linear_key_head_dim=10,
    linear_value_head_dim=12,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
MODELS = {
    "bamba": (BambaForCausalLM, BAMBA),
    "gemma3": (Gemma3ForCausalLM, GEMMA),
    "qwen3_5": (Qwen3_5ForCausalLM, QWEN),
}


class FilledUp:
    """Takes the place of DecodeGraphs: fills steps up as it does, and runs them without a graph."""

    def __init__(self, hand: Hand) -> None:
        self.runner = hand.runner
        self.num_steps = 0

    covers = DecodeGraphs.covers

    def run(self, plan) -> Decoded:
        self.num_steps += 1
        num_requests = len(plan.request_ids)
        shape = self.runner._batch.decode_shape(plan)
        packed = self.runner._batch.pack(plan, shape=shape)
        assert len(packed.token_ids_T) == shape.num_requests > num_requests
        logits_RV = self.runner.model.logits(self.runner._forward(packed))
        return Decoded(packed, logits_RV[:num_requests], greedy_tokens(logits_RV)[:num_requests])


@pytest.fixture(params=MODELS)
def pair(request, tmp_path):
    model_class, config = MODELS[request.param]
    torch.manual_seed(0)
    oracle = model_class(config).eval()
    oracle.save_pretrained(tmp_path)
    return oracle, load_model(open_checkpoint(tmp_path), dtype=torch.float32)


@pytest.fixture
def hand(pair) -> Hand:
    groups = group_layers(pair[1].info.cache_specs(block_size=4, element_bytes=4))
    return Hand(pair[1], groups, num_blocks=60)


def greedy(oracle, prompt: list[int], num_tokens: int) -> list[int]:
    known = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            known.append(int(oracle(torch.tensor([known]), use_cache=False).logits[0, -1].argmax()))
    return known[len(prompt) :]


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_chunks_beside_decoding_give_the_answers_of_transformers(hand, pair):
    hand.add("a", PROMPT[8:])
    hand.step({"a": 13})
    hand.add("b", PROMPT)
    answers = hand.run({"a": 3, "b": 2}, chunk=9)
    assert answers["b"] == greedy(pair[0], PROMPT, 2)
    assert hand.token_ids["a"][13:] == greedy(pair[0], PROMPT[8:], 4)


def test_requests_that_fill_a_step_up_change_nothing_and_touch_nothing(hand, pair, request):
    prompts = {"a": PROMPT, "b": PROMPT[5:], "c": PROMPT[11:]}
    for request_id, prompt in prompts.items():
        hand.add(request_id, prompt)
    hand.step({request_id: len(prompt) for request_id, prompt in prompts.items()})
    request.getfixturevalue("interpreted")  # from here on
    before = [[tensor.clone() for tensor in vars(cache).values()] for cache in hand.runner.cache.layers]
    hand.runner._graphs = filled_up = FilledUp(hand)
    answers = hand.run(dict.fromkeys(prompts, 1))
    assert filled_up.num_steps == 1
    for request_id, prompt in prompts.items():
        assert answers[request_id] == greedy(pair[0], prompt, 2)[1:]
    for cache, old in zip(hand.runner.cache.layers, before, strict=True):
        for tensor_B, old_B in zip(vars(cache).values(), old, strict=True):
            assert torch.equal(tensor_B[0].nan_to_num(7), old_B[0].nan_to_num(7)), "the null block was touched"


def test_a_prefix_shared_in_a_step_that_is_filled_up_changes_no_answer(tmp_path, request):
    torch.manual_seed(0)
    layers = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "head_dim": 16, "tie_word_embeddings": False}
    oracle = Gemma3ForCausalLM(Gemma3TextConfig(**COMMON, **layers, max_position_embeddings=2048)).eval()
    oracle.save_pretrained(tmp_path)
    model = load_model(open_checkpoint(tmp_path), dtype=torch.float32)
    groups = group_layers(model.info.cache_specs(block_size=4, element_bytes=4))
    hand = Hand(model, groups, num_blocks=160)
    document = [(i * i * 7 + 3 * i) % 99 + 1 for i in range(512)]
    hand.add("a", [*document, 5])
    hand.step({"a": 513})
    for request_id in "bcde":
        hand.add(request_id, [*document, ord(request_id) % 9 + 1], hit=512, hit_blocks=[hand.tables["a"][0][:128]])
    hand.step(dict.fromkeys("bcde", 1))
    request.getfixturevalue("interpreted")  # from here on
    hand.runner._graphs = filled_up = FilledUp(hand)
    num_before = hand.runner.num_spared_keys_total
    answers = hand.run(dict.fromkeys("abcde", 1))
    assert filled_up.num_steps == 1
    assert hand.runner.num_spared_keys_total - num_before == 4 * 512
    for request_id in "abcde":
        assert answers[request_id] == greedy(oracle, hand.token_ids[request_id][:513], 2)[1:]


@pytest.mark.parametrize(
    ("given", "rounded"),
    [
        ((1, 1), (1, 512)),
        ((3, 512), (4, 512)),
        ((8, 513), (8, 1024)),
        ((9, 4096), (16, 4096)),
        ((41, 5000), (48, 8192)),
        ((2, 9, [0, 0]), (2, 512, ())),
        ((2, 9, [0, 1, 5]), (2, 512, (0, 1, 8))),
    ],
)
def test_a_decode_step_is_filled_up_to_one_of_few_shapes(given, rounded):
    assert DecodeShape.covering(*given) == DecodeShape(*rounded)


@pytest.mark.parametrize(
    ("sizes", "is_recorded"), [((64, 64), True), ((192, 128), True), ((700, 64), False), ((64, 600), False)]
)
def test_steps_are_recorded_where_attention_has_kernels(sizes, is_recorded):
    layer = LayerInfo(0, "full_attention", num_heads=4, num_kv_heads=1, head_size=sizes[0], v_head_size=sizes[1])
    model = SimpleNamespace(info=SimpleNamespace(layers=(layer,)), is_recordable=True)
    assert can_be_recorded(model) == is_recorded


def test_greedy_tokens_take_the_first_of_equals_and_tell_what_is_not_finite():
    logits_RV = torch.tensor([[0.0, 2.0, 2.0], [1.0, torch.nan, 0.0], [torch.inf, 0.0, 0.0], [5.0, -torch.inf, 0.0]])
    assert greedy_tokens(logits_RV).tolist() == [1, -1, -1, 0]
