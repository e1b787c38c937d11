"""Sizes of models without weights, and how long their steps take at the least."""

import pytest

from hybrid_engine.bench.geometry import (
    CONFIGS,
    AttentionCost,
    Geometry,
    Hardware,
    RooflineClock,
    describe,
    find_hardware,
    geometry_of,
)
from hybrid_engine.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("jamba-1.5-mini", 52, 12), ("granite-4-h-small", 32, 9), ("gemma-3-27b", 27, 27), ("llama-3.1-8b", 8, 8)],
)
def test_models_have_as_many_parameters_as_their_makers_say(name, total, active):
    found = describe(name, CONFIGS[name], block_size=16)
    used = found.num_linear_parameters + found.expert_share * found.num_expert_parameters
    used += found.num_embedding_parameters + found.num_head_parameters
    assert round(found.num_parameters / 1e9) == total
    assert round(used / 1e9) == active


def test_a_jamba_has_four_attention_layers_and_28_states():
    found = describe("jamba", CONFIGS["jamba-1.5-mini"], block_size=16)
    # Four layers of eight heads of 128 elements; inner width 8,192: three inputs in bfloat16, 16 floats of state.
    assert found.attention == (AttentionCost(4 * 4 * 32 * 128, 4 * 2 * 8 * 128 * 2),)
    assert found.state_bytes == 28 * (8192 * 3 * 2 + 8192 * 16 * 4)


def test_what_a_cache_log_knows_of_the_layers_is_enough_for_their_bytes():
    found = describe("gemma", CONFIGS["gemma-3-27b"], block_size=16)
    known = geometry_of("gemma", found.specs)
    assert {cost.reach_tokens: cost.bytes_per_key for cost in known.attention} == {
        cost.reach_tokens: cost.bytes_per_key for cost in found.attention
    }


def small(*attention: AttentionCost, num_experts: int = 0, share: float = 0.0, state_bytes: int = 0) -> Geometry:
    """100 parameters in linear layers, 10 in the head, and so many in experts."""
    return Geometry("small", {}, 110 + num_experts, 0, 10, num_experts, share, attention, 0, state_bytes)


SLOW_COMPUTER, SLOW_MEMORY = Hardware("c", flops=1.0, bandwidth=1e18), Hardware("m", flops=1e18, bandwidth=1.0)


@pytest.mark.parametrize(
    ("model", "step", "flops", "moved"),
    [
        (small(), ((0,), (3,), 0), 2 * 3 * 100, 2 * 100),
        (small(), ((0, 7), (3, 1), 2), 2 * 4 * 100 + 2 * 2 * 10, 2 * 110),
        # Queries 5 and 6 see 6 and 7 keys; 7 are read and 2 written.
        (small(AttentionCost(10, 4)), ((5,), (2,), 0), 400 + 130, 200 + 4 * 9),
        # In a window of 3, at 1, queries see 2, 3, 3 keys; three and two more are read, three written.
        (small(AttentionCost(10, 4, 3)), ((1,), (3,), 0), 600 + 80, 200 + 4 * (4 + 3)),
        # A quarter of the experts a token: of two tokens' choices 7/16 are read.
        (small(num_experts=64, share=0.25), ((0,), (2,), 0), 2 * 2 * (100 + 16), 2 * (100 + 28)),
        (small(state_bytes=8), ((0, 0), (1, 1), 0), 400, 200 + 2 * 8 * 2),
    ],
    ids=["a chunk", "two sampled", "full attention", "a window", "experts", "states"],
)
def test_a_step_takes_as_long_as_its_operations_or_its_bytes(model, step, flops, moved):
    assert RooflineClock(model, SLOW_COMPUTER).seconds(*step) == pytest.approx(flops)
    assert RooflineClock(model, SLOW_MEMORY).seconds(*step) == pytest.approx(moved)


def test_hardware_is_known_by_name_or_given():
    assert find_hardware("h100").bandwidth == 3.35e12
    assert find_hardware("h100", flops=5.0) == Hardware("as given", 5.0, 3.35e12)
    with pytest.raises(ConfigError, match="hardware is 'abacus', must be one of a100, h100"):
        find_hardware("abacus")
    with pytest.raises(ConfigError, match="flops is 0, must be above 0"):
        find_hardware("h100", flops=0)
