import json
import logging

import pytest
import torch

from hybrid_engine import startup
from hybrid_engine.errors import CapacityError, CheckpointError, ConfigError
from hybrid_engine.llm import LLM
from hybrid_engine.startup import check_device, make_config, parse_bytes, read_model_config


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [(512, 512), ("512", 512), ("2GiB", 2 << 30), ("1.5 mib", 3 << 19), ("3kB", 3000), (None, None)],
)
def test_a_size_is_read(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "2 potatoes", "-1GiB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="is no size in bytes"):
        parse_bytes(text)


def test_settings_go_to_the_part_they_belong_to():
    config = make_config("m", cache_memory_bytes="1KiB", max_num_batched_tokens=7, seed=3, scheduling_policy="priority")
    assert config.scheduler.policy == "priority"
    assert (config.cache.memory_bytes, config.scheduler.max_num_scheduled_tokens, config.seed) == (1024, 7, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_sise": 16}, "'block_sise' is no setting; did you mean 'block_size'"),
        ({"wings": 2}, "'wings' is no setting; there are tokenizer, dtype"),
        ({"dtype": "float16"}, "dtype is 'float16', must be 'auto'"),
        ({"quantization": "int3"}, "quantization is 'int3', must be one of"),
        ({"quantization": "int8", "device": "cuda:1"}, "which is for device 'cpu', the device is 'cuda'"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"seed": "a"}, "seed is 'a', must be an integer"),
        ({"tokenizer": 5}, "tokenizer is 5, must be a path"),
        ({"disk_cache": 5}, "disk_cache is 5, must be a path"),
        ({"disk_cache": ""}, "disk_cache is '', must be a path"),
        ({"scheduling_policy": "fair"}, "^scheduling_policy is 'fair', must be one of fcfs, priority"),
        ({"cache_memory_bytes": -1}, "^cache_memory_bytes is -1"),
        ({"host_cache_bytes": -1}, "^host_cache_bytes is -1"),
        ({"max_num_batched_tokens": 0}, "^max_num_batched_tokens is 0"),
        ({"disk_cache": "d", "disk_cache_bytes": 0}, "^disk_cache_bytes is 0, must be above 0; leave disk_cache out"),
        ({"disk_cache_bytes": 5}, "disk_cache_bytes is 5 and there is no disk_cache"),
        ({"block_sizes": 32}, "block_sizes is 32, must map kinds to tokens"),
        (
            {"block_sizes": {"sliding": 32}},
            "block_sizes names 'sliding', must be one of full_attention, sliding_window",
        ),
        ({"block_sizes": {"sliding_window": 0}}, r"block_sizes\['sliding_window'\] is 0, must be a whole number"),
    ],
)
def test_a_wrong_setting_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_config("m", **settings)


def test_a_disk_cache_may_lie_in_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ruth")
    assert make_config("m", disk_cache="~/cache").cache.disk_folder == "/home/ruth/cache"


def test_a_config_is_read_from_its_folder_or_by_its_name(tiny_gemma3):
    assert read_model_config(tiny_gemma3) == read_model_config(tiny_gemma3 / "config.json")


def test_a_config_that_is_no_json_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is no JSON"):
        read_model_config(tmp_path)


def test_a_config_that_is_no_object_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config.json holds a list, must be an object"):
        read_model_config(tmp_path)


def test_a_config_that_is_a_folder_is_refused(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match="can't be read"):
        read_model_config(tmp_path)


def test_a_model_that_isnt_there_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        read_model_config(tmp_path / "nowhere")


def test_a_plan_needs_the_config_alone(tiny_gemma3, tmp_path):
    (tmp_path / "config.json").write_text((tiny_gemma3 / "config.json").read_text())
    plan = LLM.plan(tmp_path, cache_memory_bytes="1MiB")
    assert [(group.spec.kind, group.layer_indices) for group in plan.memory.groups] == [
        ("sliding_window", (0, 2)),
        ("full_attention", (1, 3)),
    ]
    assert plan.memory.used_bytes <= 1 << 20
    assert plan.max_model_len == 256


def test_each_kind_of_group_can_have_blocks_of_its_own_size(tiny_gemma3):
    plan = LLM.plan(tiny_gemma3, cache_memory_bytes="1MiB", block_size=8, block_sizes={"sliding_window": 32})
    assert [(group.spec.kind, group.block_size) for group in plan.memory.groups] == [
        ("sliding_window", 32),
        ("full_attention", 8),
    ]


def test_a_block_size_for_a_kind_that_no_layer_is_of_is_refused(tiny_gemma3):
    message = "block_sizes names chunked_local, this model has full_attention, sliding_window"
    with pytest.raises(ConfigError, match=message):
        LLM.plan(tiny_gemma3, block_sizes={"chunked_local": 32})


def test_the_stored_dtype_is_taken_and_half_precision_becomes_bfloat16(tiny_gemma3, tmp_path):
    config = json.loads((tiny_gemma3 / "config.json").read_text())
    found = []
    for stored in ("float32", "bfloat16", "float16"):
        (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": stored}))
        found.append(str(LLM.plan(tmp_path).dtype))
    assert found == ["torch.float32", "torch.bfloat16", "torch.bfloat16"]


def test_memory_that_holds_less_than_the_model_reaches_shortens_it_and_says_so(tiny_gemma3, caplog):
    with caplog.at_level(logging.WARNING):
        plan = LLM.plan(tiny_gemma3, cache_memory_bytes=100_000)
    assert plan.max_model_len == plan.capacity_tokens < 256
    assert f"max_model_len is {plan.max_model_len}" in caplog.text


def test_a_length_that_was_asked_for_and_doesnt_fit_is_refused(tiny_gemma3):
    with pytest.raises(CapacityError, match="max_model_len is 256, the cache memory"):
        LLM.plan(tiny_gemma3, cache_memory_bytes=100_000, max_model_len=256)


def test_a_length_beyond_the_model_is_refused(tiny_gemma3):
    with pytest.raises(ConfigError, match="max_model_len is 257, the model reaches 256"):
        LLM.plan(tiny_gemma3, max_model_len=257)


@pytest.mark.parametrize(
    ("name", "value"),
    [("block_size", "16"), ("max_num_seqs", 2.5), ("num_threads", "2"), ("max_model_len", "8"), ("block_size", True)],
)
def test_a_setting_of_the_wrong_kind_is_named(tmp_path, name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value!r}, must be an integer"):
        make_config(tmp_path, **{name: value})


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", 0])
def test_a_device_that_is_none_is_refused(device):
    with pytest.raises(ConfigError, match="must be 'cpu', 'cuda' or the like of 'cuda:1'"):
        make_config("model", device=device)


def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"device is 'cuda:99', torch .* sees"):
        check_device("cuda:99")


def test_a_gpu_without_triton_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(startup, "has_triton", lambda: False)
    with pytest.raises(ConfigError, match="needs Triton"):
        check_device("cuda")
