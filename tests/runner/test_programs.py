"""Decode steps that are played back give what they give computed anew."""

import numpy as np
import pytest
import torch
from hand_plans import Hand
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, JambaConfig, JambaForCausalLM

from hybrid_engine.groups.spec import group_layers
from hybrid_engine.models.registry import load_model
from hybrid_engine.runner import batch, model_runner, programs
from hybrid_engine.runner.programs import FixedStaging
from hybrid_engine.weights import open_checkpoint

COMMON = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GEMMA = Gemma3TextConfig(
    **COMMON, head_dim=16, sliding_window=10, layer_types=["sliding_attention", "full_attention"] * 2
)
JAMBA = JambaConfig(**COMMON, attn_layer_period=3, attn_layer_offset=1, num_experts=1, mamba_d_state=16)
JAMBA_WITH_EXPERTS = JambaConfig(**COMMON, attn_layer_period=3, attn_layer_offset=1, num_experts=4, mamba_d_state=16)
PROMPTS = {"a": [5, 9, 2, 33, 60, 1, 1, 48, 20, 7, 13, 3, 54, 22], "b": [77], "c": [31, 4, 4, 99, 8]}


def load(config, folder) -> torch.nn.Module:
    torch.manual_seed(0)
    oracle = (Gemma3ForCausalLM if config is GEMMA else JambaForCausalLM)(config)
    oracle.save_pretrained(folder)
    return load_model(open_checkpoint(folder), dtype=torch.float32)


def make_hand(model) -> Hand:
    return Hand(model, group_layers(model.info.cache_specs(block_size=4, element_bytes=4)), num_blocks=100)


def answers(hand: Hand) -> dict[str, list[int]]:
    """Answers of different lengths: steps of three requests, of two, of one; the keys pass a power of two."""
    for request_id, prompt in PROMPTS.items():
        hand.add(request_id, prompt)
    return hand.run({"a": 4, "b": 9, "c": 14})


@pytest.mark.parametrize("config", [GEMMA, JAMBA], ids=["gemma 3", "jamba"])
def test_answers_are_those_of_steps_computed_anew(config, tmp_path, monkeypatch):
    model = load(config, tmp_path)
    monkeypatch.setattr(batch, "_MIN_DECODE_KEYS", 8)
    played = make_hand(model)
    found = answers(played)
    shapes = [(shape.num_requests, shape.num_keys) for shape, _ in played.runner._programs._programs]
    assert {3, 2, 1} == {num_requests for num_requests, _ in shapes}
    assert len(shapes) > 3
    monkeypatch.setattr(model_runner, "has_programs", lambda model: False)
    assert found == answers(make_hand(model))


def test_a_model_with_experts_is_computed_anew_in_each_step(tmp_path):
    hand = make_hand(load(JAMBA_WITH_EXPERTS, tmp_path))
    assert hand.runner._programs is None


def test_a_model_that_looks_at_values_is_not_tried_twice(tmp_path, monkeypatch):
    model = load(GEMMA, tmp_path)
    attention = model.layers[0].attention
    run = attention.forward
    monkeypatch.setattr(attention, "forward", lambda x_TE, **rest: run(x_TE[: len(x_TE.tolist())], **rest))
    hand = make_hand(model)
    found = answers(hand)
    assert not hand.runner._programs._can_record
    assert not hand.runner._programs._programs
    monkeypatch.undo()
    assert found == answers(make_hand(model))


def test_programs_used_last_are_kept_and_no_more_than_so_many(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "MOST_PROGRAMS", 2)
    hand = make_hand(load(GEMMA, tmp_path))
    answers(hand)
    assert [shape.num_requests for shape, _ in hand.runner._programs._programs] == [2, 1]


def test_a_program_of_too_many_bytes_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "MOST_BYTES", 1000)
    hand = make_hand(load(GEMMA, tmp_path))
    assert len(answers(hand)["c"]) == 14
    assert not hand.runner._programs._programs


def test_each_steps_arrays_get_the_same_tensors():
    staging = FixedStaging()
    staging.begin()
    first = [staging.put(np.array([1, 2])), staging.put(np.array([[3]]))]
    staging.begin()
    second = [staging.put(np.array([4, 5])), staging.put(np.array([[6]]))]
    assert [x.data_ptr() for x in first] == [x.data_ptr() for x in second]
    assert [x.tolist() for x in first] == [[4, 5], [[6]]]
    staging.begin()
    with pytest.raises(AssertionError):
        staging.put(np.array([1, 2, 3]))
