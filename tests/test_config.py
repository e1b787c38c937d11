import pytest

from hybrid_engine.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from hybrid_engine.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"async_depth": 3}, "async_depth is 3, must be from 0 to 2"),
        ({"draft_slots": -1}, "draft_slots is -1, must be at least 0"),
        ({"draft_slots": 1.5}, "draft_slots is 1.5, must be an integer"),
        ({"policy": "fair"}, "policy is 'fair', must be one of fcfs, priority"),
        ({"max_num_batched_tokens": 3, "draft_slots": 3}, r"must be above draft_slots \(3\)"),
        ({"ageing_steps": -5}, "ageing_steps is -5, must be at least 0"),
    ],
)
def test_a_setting_of_the_scheduler_out_of_its_range_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**settings)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (SchedulerConfig, {"max_num_seqs": None}, "max_num_seqs is None, must be an integer"),
        (CacheConfig, {"block_size": None}, "block_size is None, must be an integer"),
        (CacheConfig, {"memory_bytes": "1"}, "memory_bytes is '1', must be an integer, or None"),
        (CacheConfig, {"enable_prefix_caching": "no"}, "enable_prefix_caching is 'no', must be True or False"),
        (SpeculativeConfig, {"prompt_lookup_min": None}, "prompt_lookup_min is None, must be an integer"),
        (SpeculativeConfig, {"method": "draft_model", "model": 5}, "model is 5, must be a path"),
    ],
)
def test_a_setting_of_the_wrong_kind_is_refused(kind, settings, message):
    with pytest.raises(ConfigError, match=message):
        kind(**settings)
