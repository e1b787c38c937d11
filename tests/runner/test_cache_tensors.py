import pytest
import torch

from hybrid_engine.errors import CapacityError, ConfigError
from hybrid_engine.groups.layout import split_memory
from hybrid_engine.groups.spec import FullAttentionSpec, Group, MambaSpec, SlidingWindowSpec, group_layers
from hybrid_engine.runner.cache_tensors import CacheTensors
from hybrid_engine.step_plan import BlockCopy

FULL = FullAttentionSpec(num_kv_heads=2, head_size=3, element_bytes=4, block_size=4)
SLIDING = SlidingWindowSpec(num_kv_heads=1, head_size=5, element_bytes=4, block_size=8, window=9)
GROUPS = group_layers({0: SLIDING, 1: FULL, 2: SLIDING})


@pytest.fixture
def cache() -> CacheTensors:
    """Two groups; each block is full of its own index."""
    cache = CacheTensors(split_memory(GROUPS, [6, 4]), dtype=torch.float32)
    for group_id, count in enumerate([6, 4]):
        for block_id in range(count + 1):
            cache.poison(group_id, [block_id], block_id)
    return cache


def test_each_layer_has_the_shape_of_its_group_and_one_null_block(cache):
    shapes = [tuple(layer.k_BKPD.shape) for layer in cache.layers]
    assert shapes == [(7, 1, 8, 5), (5, 2, 4, 3), (7, 1, 8, 5)]
    assert [tuple(layer.v_BKPD.shape) for layer in cache.layers] == shapes


def test_poison_reaches_keys_and_values_of_one_group_alone(cache):
    cache.poison(0, [2, 5], torch.nan)
    assert cache.layers[2].v_BKPD.isnan().flatten(1).all(1).tolist() == [False, False, True, False, False, True, False]
    assert not cache.layers[1].k_BKPD.isnan().any()


def test_a_copy_takes_the_first_slots_in_every_layer_of_the_group(cache):
    cache.copy_blocks([BlockCopy(0, source_id=3, target_id=6, num_slots=5)])
    for layer_index in (0, 2):
        for tensor in (cache.layers[layer_index].k_BKPD, cache.layers[layer_index].v_BKPD):
            assert tensor[6, 0, :, 0].tolist() == [3, 3, 3, 3, 3, 6, 6, 6]
    assert cache.layers[1].k_BKPD[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]


def test_copies_run_in_the_order_given(cache):
    cache.copy_blocks([BlockCopy(1, 1, 2, 4), BlockCopy(1, 2, 3, 4)])
    assert cache.layers[1].v_BKPD[:, 1, 3, 2].tolist() == [0, 1, 1, 1, 4]


@pytest.mark.parametrize(("source_id", "target_id"), [(0, 1), (1, 0), (5, 1), (1, 5), (-1, 1)])
def test_a_copy_from_or_to_what_no_request_may_hold_is_an_error(cache, source_id, target_id):
    with pytest.raises(AssertionError, match=r"of group 1, ids are below 5"):
        cache.copy_blocks([BlockCopy(1, source_id, target_id, 2)])


def test_a_cache_planned_for_another_dtype_is_an_error():
    with pytest.raises(AssertionError, match="bfloat16 to be kept"):
        CacheTensors(split_memory(GROUPS, [6, 4]), dtype=torch.bfloat16)


def test_a_layer_without_a_group_is_an_error():
    with pytest.raises(AssertionError, match=r"groups have layers \[0, 2\]"):
        CacheTensors(split_memory([Group(0, FULL, (0, 2))], [4]), dtype=torch.float32)


def test_memory_that_is_not_there_is_a_capacity_error():
    with pytest.raises(CapacityError, match="give the cache less"):
        CacheTensors(split_memory(GROUPS, [1 << 50, 4]), dtype=torch.float32)


STATES = MambaSpec(conv_shape=(6, 3), ssm_shape=(2, 4, 5), conv_element_bytes=2)


@pytest.fixture
def states() -> CacheTensors:
    """A state group of two layers around one of attention; each slot is full of its own index."""
    full = FullAttentionSpec(num_kv_heads=2, head_size=3, element_bytes=2, block_size=4)
    cache = CacheTensors(split_memory(group_layers({0: STATES, 1: full, 2: STATES}), [4, 4]), dtype=torch.bfloat16)
    for slot in range(5):
        cache.poison(0, [slot], slot)
    return cache


def test_a_state_layer_keeps_inputs_in_the_models_dtype_and_recurrent_states_in_float32(states):
    for layer in (states.layers[0], states.layers[2]):
        assert (tuple(layer.conv_SIW.shape), layer.conv_SIW.dtype) == ((5, 6, 3), torch.bfloat16)
        assert (tuple(layer.ssm_S.shape), layer.ssm_S.dtype) == ((5, 2, 4, 5), torch.float32)


def test_the_planned_bytes_of_a_state_are_those_allocated(states):
    layer = states.layers[0]
    assert STATES.page_bytes == layer.conv_SIW[1].nbytes + layer.ssm_S[1].nbytes


def test_a_copy_takes_the_whole_state_in_every_layer_of_the_group(states):
    states.copy_blocks([BlockCopy(0, source_id=3, target_id=1, num_slots=1)])
    for layer in (states.layers[0], states.layers[2]):
        for tensor in (layer.conv_SIW, layer.ssm_S):
            assert tensor.flatten(1).float().mean(1).tolist() == [0, 3, 2, 3, 4]


def test_a_layer_that_only_convolves_keeps_its_inputs_and_nothing_else():
    spec = MambaSpec(conv_shape=(6, 3), ssm_shape=(0,), conv_element_bytes=2)
    cache = CacheTensors(split_memory(group_layers({0: spec}), [3]), dtype=torch.bfloat16)
    for slot in range(4):
        cache.poison(0, [slot], slot)
    cache.copy_blocks([BlockCopy(0, source_id=3, target_id=1, num_slots=1)])
    layer = cache.layers[0]
    assert spec.page_bytes == layer.conv_SIW[1].nbytes == 36
    assert layer.ssm_S.nbytes == 0
    assert layer.conv_SIW.float().mean((1, 2)).tolist() == [0, 3, 2, 3]


def test_a_state_of_no_dimensions_is_refused():
    with pytest.raises(ConfigError, match=r"ssm_shape is \(\), which is one number, must be \(0,\)"):
        MambaSpec(conv_shape=(6, 3), ssm_shape=(), conv_element_bytes=2)


def test_recurrent_states_planned_in_16_bits_are_an_error():
    spec = MambaSpec(conv_shape=(6, 3), ssm_shape=(4, 5), conv_element_bytes=4, ssm_element_bytes=2)
    with pytest.raises(AssertionError, match="recurrent states are float32"):
        CacheTensors(split_memory(group_layers({0: spec}), [4]), dtype=torch.float32)
