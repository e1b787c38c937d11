"""What is wrong with a checkpoint of a family is said by name: each kind of tensor missing, renamed or misshapen."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import attention_families
import delta_families
import pytest
import state_families
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybrid_engine.errors import CheckpointError, ConfigError
from hybrid_engine.models.registry import describe_model, load_model
from hybrid_engine.weights import Checkpoint, open_checkpoint
from hybrid_engine.weights.loader import is_unused, plain_name

FAMILIES = attention_families.FAMILIES | delta_families.FAMILIES
WITHOUT_LIST = ("phi3", "mixtral", "qwen3_moe")
"""Configs that have one kind of layers and no list of them."""
every_family = pytest.mark.parametrize("name", FAMILIES)
ALL = FAMILIES | state_families.FAMILIES
every_checkpoint = pytest.mark.parametrize("name", ALL)


class InMemory(Checkpoint):
    """Tensors that a test has in its hands."""

    def __init__(self, stored: Checkpoint, tensors: dict[str, Tensor]) -> None:
        self.path, self.config, self.tensors = stored.path, stored.config, tensors

    def names(self) -> Iterable[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def tensor(self, name: str, *, dtype: torch.dtype | None = None) -> Tensor:
        return self.tensors[name].to(dtype)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, save_tiny) -> Callable[[str], Path]:
    """A folder with a family's tiny checkpoint, made once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("family")
            save_tiny(*ALL[name](), made[name])
        return made[name]

    return make


def errors_of(folder: Path, damage: Callable[[dict[str, Tensor], str], None]) -> dict[str, str]:
    """The error that damage to one tensor of each kind gives, by the tensor's name; "" where there is none."""
    stored = open_checkpoint(folder)
    tensors = {name: stored.tensor(name) for name in stored.names()}
    one_of_each = {re.sub(r"\.\d+\.", ".*.", name): name for name in tensors if not is_unused(name)}.values()
    errors = {}
    for name in one_of_each:
        damaged = dict(tensors)
        damage(damaged, name)
        try:
            load_model(InMemory(stored, damaged), dtype=torch.float32)
            errors[name] = ""
        except CheckpointError as error:
            errors[name] = str(error)
    return errors


def is_missed(name: str, error: str) -> bool:
    """Whether an error says that a tensor isn't there."""
    return " lacks " in error and plain_name(name).removeprefix("model.") in error


@every_checkpoint
def test_every_kind_of_tensor_is_missed_by_name(name, saved):
    errors = errors_of(saved(name), lambda tensors, one: tensors.pop(one))
    assert [one for one, error in errors.items() if not is_missed(one, error)] == []


@pytest.mark.slow
@every_checkpoint
def test_every_kind_of_tensor_under_another_name_is_missed_by_its_own(name, saved):
    errors = errors_of(saved(name), lambda tensors, one: tensors.update({f"{one}.renamed": tensors.pop(one)}))
    assert [one for one, error in errors.items() if not is_missed(one, error)] == []


@pytest.mark.slow
@every_checkpoint
def test_every_kind_of_tensor_of_another_shape_is_named_with_both_shapes(name, saved):
    errors = errors_of(saved(name), lambda tensors, one: tensors.update({one: tensors[one][:-1]}))
    assert [one for one, error in errors.items() if f"{one} has shape" not in error] == []


@every_checkpoint
def test_a_tensor_that_nothing_reads_is_named(name, saved):
    stored = open_checkpoint(saved(name))
    tensors = {one: stored.tensor(one) for one in stored.names()} | {"model.layers.1.self_attn.extra": torch.ones(3)}
    with pytest.raises(CheckpointError, match=r"has tensors that nothing reads: model.layers.1.self_attn.extra"):
        load_model(InMemory(stored, tensors), dtype=torch.float32)


@every_checkpoint
def test_a_file_that_is_cut_short_is_refused_before_anything_is_read(name, saved, tmp_path):
    for file in saved(name).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"model.safetensors is cut short"):
        open_checkpoint(tmp_path)


@every_family
def test_a_head_that_the_config_ties_and_the_file_does_not_is_refused(name, saved, tmp_path):
    config = json.loads((saved(name) / "config.json").read_text()) | {"tie_word_embeddings": True}
    tensors = load_file(saved(name) / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"lm_head.weight differs from the embedding, though the config ties them"
    ):
        load_model(open_checkpoint(tmp_path), dtype=torch.float32)


@pytest.mark.parametrize("name", [name for name in FAMILIES if not name.startswith(WITHOUT_LIST)])
def test_a_list_of_layers_that_is_too_short_is_refused(name, saved):
    config = json.loads((saved(name) / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"layer_types has 1 entries, must have one for each of the \d layers"):
        describe_model(config | {"layer_types": config["layer_types"][:1]})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("granite_swa", {"layer_rope_theta": [5.0]}, "layer_rope_theta has 1 entries, must have one for each of 5"),
        ("llama4_text", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries, must have one for each of the 5"),
        ("llama4_text", {"layer_types": ["sliding_attention"] * 5}, "known here: full_attention, chunked_attention"),
        ("mimo_v2_flash", {"mlp_layer_types": ["dense"]}, "mlp_layer_types is .*, must be dense or sparse for each"),
        ("mimo_v2_flash", {"n_group": 3}, "n_group is 3 and topk_group 2: 8 experts must be a multiple of the first"),
        ("mimo_v2_flash", {"topk_group": 5}, "n_group is 4 and topk_group 5"),
        ("mimo_v2_flash", {"num_key_value_heads": 8}, r"a multiple of twice num_key_value_heads \(16\)"),
        ("gemma3n_text", {"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4: no full_attention layer is left"),
        ("gemma3n_text", {"altup_active_idx": 3}, r"altup_active_idx is 3, must be below altup_num_inputs \(3\)"),
        ("gemma3n_text", {"intermediate_size": [8, 8]}, "intermediate_size has 2 entries, must have one for each"),
        ("gemma3n_text", {"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern has 1 entries"),
        ("gemma4_text", {"num_kv_shared_layers": 5}, "no full_attention layer is left|no sliding_attention layer"),
        ("gemma4_text", {"per_layer_config": {"1": {"window": 3}}}, "per_layer_config of layer 1 names window"),
        ("gemma4_text", {"per_layer_config": {"1": {"head_dim": 8}}}, "is to read layer 1, whose heads are others"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "an embedding model"),
        ("gemma4_text with experts, keys as values", {"top_k_experts": 6}, "top_k_experts is 6, must be at most"),
        ("gpt_oss", {"num_experts_per_tok": 6}, r"must be at most the number of experts \(5\)"),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": "LLX"}, "'LLX', must be of the letters L and G"),
        (
            "phi3 with longrope",
            {"max_position_embeddings": 512, "rope_parameters": {"rope_type": "longrope"}},
            "long_fa",
        ),
        ("qwen3_next", {"layer_types": ["conv"] * 5}, "layer_types holds conv; known here: full_attention, delta_net"),
        ("qwen3_next", {"linear_num_key_heads": 4}, r"6, must be a multiple of linear_num_key_heads \(4\)"),
        ("qwen3_next", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1, must be at least 2"),
        ("qwen3_next", {"num_experts_per_tok": 6}, r"must be at most the number of experts \(5\)"),
        ("qwen3_next", {"mlp_only_layers": ["a"]}, "mlp_only_layers = .*, must be a list, each entry a whole number"),
        ("qwen3_5_text", {"linear_key_head_dim": 0}, "linear_key_head_dim = 0, must be a whole number above 0"),
        ("qwen3_5_moe_text", {"hidden_act": "gelu_pytorch_tanh"}, "the recurrent layers want silu"),
        ("olmo_hybrid", {"linear_allow_neg_eigval": 2}, "linear_allow_neg_eigval = 2, must be true or false"),
        ("olmo_hybrid", {"linear_num_value_heads": 5}, r"5, must be a multiple of linear_num_key_heads \(2\)"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope is false: latent attention that turns keys"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "is 'softmax', must be 'sigmoid'"),
        ("kimi_linear", {"mlp_layer_types": ["sparse"]}, "must be dense or sparse for each of 5 layers"),
        ("kimi_linear", {"num_expert_group": 4}, "n_group is 4 and topk_group 1: 6 experts must be a multiple"),
        ("kimi_linear", {"linear_attn_config": {"head_dim": 0}}, "linear_head_dim = 0, must be a whole number above 0"),
        (
            "kimi_linear",
            {"layer_types": None, "linear_attn_config": {"full_attn_layers": [2, 5], "kda_layers": [1, 3]}},
            "must name each layer from 1 to 5 once",
        ),
        ("minimax", {"rotary_dim": 11}, r"rotary_dim is 11, must be at most head_dim \(10\)"),
        ("minimax", {"mlp_beta_factor": 0}, "mlp_beta_factor = 0, must be a number above 0"),
        ("cohere2", {"rope_parameters": {"rope_theta": 9.0, "partial_rotary_factor": 0.5}}, "4 of a head's 8 .* all"),
    ],
    ids=str,
)
def test_what_a_family_cannot_be_is_refused_by_name(name, change, message, saved):
    config = json.loads((saved(name) / "config.json").read_text())
    with pytest.raises(ConfigError, match=message):
        describe_model(config | change)


def test_letters_give_the_layers_and_the_last_is_global(saved):
    config = json.loads((saved("exaone4") / "config.json").read_text())
    layers = describe_model(config | {"layer_types": None, "sliding_window_pattern": "LG"}).layers
    assert [layer.kind for layer in layers] == ["sliding_attention", "full_attention"] * 2 + ["full_attention"]
