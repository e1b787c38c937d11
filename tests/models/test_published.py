"""Plans of well-known checkpoints against calculations by hand. A block has 16 tokens, an element two bytes."""

from __future__ import annotations

import json

import pytest

from hybrid_engine import families
from hybrid_engine.cli import main
from hybrid_engine.groups.base import NEVER
from hybrid_engine.llm import LLM
from hybrid_engine.models.published import PUBLISHED, config_of
from hybrid_engine.models.registry import ARCHITECTURES

# layers * 16 tokens * kv heads * (key size + value size) * 2 bytes
BLOCKS = {
    "cohere2": {"last 4,096": 24 * 16 * 8 * 256 * 2, "all": 8 * 16 * 8 * 256 * 2},
    "exaone4": {"last 4,096": 48 * 16 * 8 * 256 * 2, "all": 16 * 16 * 8 * 256 * 2},
    "gemma2": {"last 4,096": 13 * 16 * 4 * 512 * 2, "all": 13 * 16 * 4 * 512 * 2},
    "gemma3_text": {"last 512": 245_760, "all": 49_152},
    # 35 layers, of which the last 15 read what layers 18 and 19 keep
    "gemma3n_text": {"last 512": 16 * 16 * 2 * 512 * 2, "all": 4 * 16 * 2 * 512 * 2},
    "gpt_oss": {"last 128": 12 * 16 * 8 * 128 * 2, "all": 12 * 16 * 8 * 128 * 2},
    "llama": {"all": 32 * 16 * 8 * 256 * 2},
    "llama4_text": {"chunk of 8,192": 36 * 16 * 8 * 256 * 2, "all": 12 * 16 * 8 * 256 * 2},
    # layers with a window have twice the kv heads; keys have 192 elements, values 128
    "mimo_v2_flash": {"all": 9 * 16 * 4 * 320 * 2, "last 129": 39 * 16 * 8 * 320 * 2},
    "mistral": {"last 4,096": 32 * 16 * 8 * 256 * 2},
    "mixtral": {"all": 32 * 16 * 8 * 256 * 2},
    "phi3": {"last 2,047": 32 * 16 * 32 * 192 * 2},
    "qwen2": {"all": 28 * 16 * 4 * 256 * 2},
    "qwen3": {"all": 36 * 16 * 8 * 256 * 2},
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_of_a_published_model_take_what_a_calculation_by_hand_says(kind, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_of(kind)))
    plan = LLM.plan(file, dtype="bfloat16", cache_memory_bytes="64GiB", max_model_len=2048)
    assert {families.keeps(group): group.block_bytes for group in plan.memory.groups} == BLOCKS[kind]


def blocks_of_one_request(reach: str) -> int | None:
    """Blocks of 16 tokens that a request, however long, holds of what its layers keep; None: it has no end."""
    if reach == "all" or reach.startswith("what"):
        return None
    if reach == "a state":
        return 1
    tokens = int(reach.split()[-1].replace(",", ""))
    # A window of W tokens lies over a block more than W - 1 tokens fill; behind a chunk the next one begins.
    return tokens // 16 + 1 if reach.startswith("chunk") else -(-(tokens - 1) // 16) + 1


def capacity_by_hand(memory_bytes: int, blocks: dict[str, int]) -> int | None:
    """Tokens of one request: extents of the largest block, or so many of it that at most 2 % are left over, but for the
    null block; each reach that has an end takes whole extents, what sees all takes the rest."""
    largest = max(blocks.values())
    extent = next(
        k * largest for k in range(1, 51) if max(k * largest % size for size in blocks.values()) <= 0.02 * k * largest
    )
    num_left = (memory_bytes - largest) // extent
    endless = None
    for reach, size in blocks.items():
        count = blocks_of_one_request(reach)
        if count is None:
            endless = extent // size
        else:
            num_left -= -(-count // (extent // size))
    return None if endless is None else num_left * endless * 16


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_request_can_be_as_long_as_a_calculation_by_hand_says(kind, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_of(kind)))
    plan = LLM.plan(file, dtype="bfloat16", cache_memory_bytes="64GiB", max_model_len=1)
    groups = {families.keeps(group): group.block_bytes for group in plan.memory.groups}
    assert len(groups) == len(plan.memory.groups)
    by_hand = capacity_by_hand(64 << 30, groups)
    assert plan.memory.capacity_tokens == (NEVER if by_hand is None else by_hand)


def test_every_published_model_has_a_family_and_a_calculation():
    assert PUBLISHED.keys() <= ARCHITECTURES.keys()
    # Calculated in test_hybrid_config.py, test_published_state_hybrids.py and test_delta_config.py.
    with_states = {"jamba", "falcon_h1", "falcon_mamba", "lfm2_moe", "nemotron_h", "recurrent_gemma", "zamba", "zamba2"}
    with_states |= {"kimi_linear", "minimax", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"}
    assert PUBLISHED.keys() - with_states == BLOCKS.keys()


def test_the_page_of_families_is_what_the_command_prints(repository, capsys):
    with pytest.raises(SystemExit):
        main(["models", "--markdown"])
    assert capsys.readouterr().out == (repository / "docs" / "MODELS.md").read_text()


def test_every_family_is_measured():
    assert [row[0] for row in families.rows() if row[-1] == "not measured"] == []


def test_the_plan_of_a_model_whose_layers_share_shows_whose_keys_they_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_of("gemma3n_text")))
    with pytest.raises(SystemExit):
        main(["plan", str(file), "--memory", "1GiB"])
    shown = capsys.readouterr().out
    assert "what 19 keeps" in shown
    assert "16: 0-3, 5-8, 10-13, 15-18" in " ".join(shown.split())
