"""What a model keeps and computes, from its config alone: enough to replay traces without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybrid_engine.errors import ConfigError
from hybrid_engine.groups.spec import AttentionSpec, LayerSpec, MambaSpec
from hybrid_engine.models.base import CHUNKED, SLIDING, LayerInfo
from hybrid_engine.models.config import DecoderConfig, text_config
from hybrid_engine.models.registry import ARCHITECTURES, describe_model

ELEMENT_BYTES = 2
"""bfloat16."""


@dataclass(frozen=True)
class AttentionCost:
    """What attention layers of one reach do for a token."""

    flops_per_key: int
    """Of all these layers: a query against one key, and its value added."""
    bytes_per_key: int
    """A key and a value in all these layers."""
    reach_tokens: int | None = None
    """Keys that a query sees at most; None: all before it."""


@dataclass(frozen=True)
class Geometry:
    """A model's sizes."""

    name: str
    specs: Mapping[int, LayerSpec]
    """What each layer keeps, by its index."""
    num_parameters: int
    num_embedding_parameters: int
    """Looked up, not multiplied with."""
    num_head_parameters: int
    """Multiplied with where a token is sampled."""
    num_expert_parameters: int
    """Of all experts together."""
    expert_share: float
    """Share of the experts that a token goes through."""
    attention: tuple[AttentionCost, ...]
    recurrent_flops: int
    """A token's step of all recurrent states."""
    state_bytes: int
    """All recurrent states of one request."""

    @property
    def num_linear_parameters(self) -> int:
        """Those that every token is multiplied with."""
        others = self.num_embedding_parameters + self.num_head_parameters + self.num_expert_parameters
        return self.num_parameters - others


def describe(name: str, config: Mapping[str, Any], *, block_size: int) -> Geometry:
    """Return the sizes of a model by its config. Raises UnknownModelError or ConfigError."""
    info, values = describe_model(config), text_config(config)
    decoder = ARCHITECTURES[values["model_type"]].resolve(values)
    table = info.vocab_size * info.hidden_size
    experts = 3 * info.hidden_size * decoder.intermediate_size * sum(layer.num_experts for layer in info.layers)
    most = max((layer.num_experts for layer in info.layers), default=0)
    specs = info.cache_specs(block_size=block_size, element_bytes=ELEMENT_BYTES)
    states = [layer for layer in info.layers if layer.recurrent is not None]
    return Geometry(
        name=name,
        specs=specs,
        num_parameters=info.num_parameters,
        # A tied table is read as the head.
        num_embedding_parameters=0 if decoder.is_tied else table,
        num_head_parameters=table,
        num_expert_parameters=experts,
        expert_share=decoder.num_experts_per_token / most if most else 0.0,
        attention=tuple(_attention_costs(decoder)),
        # The state decays, takes in the token and is read: three multiplications and two additions an element.
        recurrent_flops=sum(5 * _num_state_elements(layer) for layer in states),
        state_bytes=sum(specs[layer.index].page_bytes for layer in states),
    )


def geometry_of(name: str, specs: Mapping[int, LayerSpec]) -> Geometry:
    """Return the sizes of a model of which only what it keeps is known: nothing is known of what it computes."""
    sums: dict[int | None, int] = {}
    for spec in specs.values():
        if isinstance(spec, AttentionSpec):
            reach = getattr(spec, "window", None) or getattr(spec, "chunk", None)
            sums[reach] = sums.get(reach, 0) + spec.layer_token_bytes
    states = sum(spec.page_bytes for spec in specs.values() if isinstance(spec, MambaSpec))
    costs = tuple(AttentionCost(0, size, reach) for reach, size in sums.items())
    return Geometry(name, specs, 0, 0, 0, 0, 0.0, costs, 0, states)


def _num_state_elements(layer: LayerInfo) -> int:
    elements = 1
    for size in layer.recurrent.ssm_shape if layer.recurrent else ():
        elements *= size
    return elements


def _attention_costs(decoder: DecoderConfig) -> list[AttentionCost]:
    """Add up the attention layers of equal reach."""
    sums: dict[int | None, list[int]] = {}
    for layer in decoder.layers:
        if layer.recurrent is None:
            reach = layer.window if layer.kind == SLIDING else layer.chunk if layer.kind == CHUNKED else None
            flops_bytes = sums.setdefault(reach, [0, 0])
            flops_bytes[0] += 4 * layer.num_heads * layer.head_size
            flops_bytes[1] += 2 * layer.num_kv_heads * layer.head_size * ELEMENT_BYTES
    return [AttentionCost(flops, size, reach) for reach, (flops, size) in sums.items()]


JAMBA_MINI = {
    "model_type": "jamba",
    "vocab_size": 65_536,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "max_position_embeddings": 262_144,
}
"""As published with ai21labs/AI21-Jamba-1.5-Mini: 52 billion parameters, 12 active."""
GRANITE_SMALL = {
    "model_type": "granitemoehybrid",
    "vocab_size": 100_352,
    "hidden_size": 4096,
    "intermediate_size": 768,
    "shared_intermediate_size": 1536,
    "num_local_experts": 72,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 40,
    "layer_types": ["attention" if index % 10 == 5 else "mamba" for index in range(40)],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "tie_word_embeddings": True,
}
"""As published with ibm-granite/granite-4.0-h-small: 32 billion parameters, 9 active."""
GEMMA_27B = {
    "model_type": "gemma3_text",
    "vocab_size": 262_208,
    "hidden_size": 5376,
    "intermediate_size": 21_504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 168,
    "max_position_embeddings": 131_072,
}
"""As published with google/gemma-3-27b-it: five sliding layers to a full one."""
LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
}
"""As published with meta-llama/Llama-3.1-8B: full attention alone, to compare with."""
CONFIGS: dict[str, Mapping[str, Any]] = {
    "jamba-1.5-mini": JAMBA_MINI,
    "granite-4-h-small": GRANITE_SMALL,
    "gemma-3-27b": GEMMA_27B,
    "llama-3.1-8b": LLAMA_8B,
}
"""Models that need no file. What a config leaves out is what transformers takes for its model type."""


@dataclass(frozen=True)
class Hardware:
    """Peak speeds, as the maker's data sheet has them."""

    name: str
    flops: float
    """Dense bfloat16 operations a second."""
    bandwidth: float
    """Bytes of memory a second."""

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be above 0")


HARDWARE = {
    each.name: each
    for each in (
        Hardware("a100", 312e12, 2.039e12),
        Hardware("h100", 989e12, 3.35e12),
        Hardware("h200", 989e12, 4.8e12),
        Hardware("b200", 2250e12, 8.0e12),
        Hardware("laptop", 1e12, 0.1e12),
    )
}
"""The SXM variants of NVIDIA's cards (80 GB for the first). 'laptop' is no product: a processor with wide vectors."""


def find_hardware(name: str, *, flops: float | None = None, bandwidth: float | None = None) -> Hardware:
    """Return speeds by name, or those given instead. Raises ConfigError for a name that isn't known."""
    if name not in HARDWARE:
        raise ConfigError(f"hardware is {name!r}, must be one of {', '.join(HARDWARE)}; or give flops and bandwidth")
    found = HARDWARE[name]
    if flops is None and bandwidth is None:
        return found
    return Hardware(
        "as given", found.flops if flops is None else flops, found.bandwidth if bandwidth is None else bandwidth
    )


class RooflineClock:
    """Says how long a step takes at the least: as long as its operations or its bytes need at peak speed.

    The longer of the two counts (Williams, Waterman and Patterson 2009, "Roofline"). Nothing else does: no launches, no
    communication, no cache but the registers, so that real steps take longer.
    """

    def __init__(self, geometry: Geometry, hardware: Hardware) -> None:
        self.geometry = geometry
        self.hardware = hardware

    def seconds(self, positions: tuple[int, ...], num_new: tuple[int, ...], num_sampled: int) -> float:
        """Return how long a step takes. By request: tokens before those that it computes, and how many these are."""
        flops = bytes_moved = 0.0
        model, num_tokens = self.geometry, sum(num_new)
        per_token = model.num_linear_parameters + model.num_expert_parameters * model.expert_share
        flops += 2 * num_tokens * per_token + num_tokens * model.recurrent_flops
        flops += 2 * num_sampled * model.num_head_parameters
        # Experts that no token of the step is sent to aren't read; tokens are taken to choose evenly.
        read_share = 1 - (1 - model.expert_share) ** num_tokens
        read = model.num_linear_parameters + read_share * model.num_expert_parameters
        read += model.num_head_parameters if num_sampled else 0
        bytes_moved += ELEMENT_BYTES * read + 2 * model.state_bytes * len(num_new)
        for cost in model.attention:
            num_pairs, num_keys = _pairs_and_keys(positions, num_new, cost.reach_tokens)
            flops += cost.flops_per_key * num_pairs
            bytes_moved += cost.bytes_per_key * (num_keys + num_tokens)
        return max(flops / self.hardware.flops, bytes_moved / self.hardware.bandwidth)


def _pairs_and_keys(positions: tuple[int, ...], num_new: tuple[int, ...], reach: int | None) -> tuple[int, int]:
    """Return how many pairs of query and key a step has, and how many keys it reads, over all requests."""
    num_pairs = num_keys = 0
    for position, count in zip(positions, num_new, strict=True):
        end = position + count
        if reach is None or end <= reach:
            num_pairs += count * position + count * (count + 1) // 2
            num_keys += end
        else:
            # Queries below reach - 1 see all before them, the others a whole window.
            growing = max(0, min(count, reach - position))
            num_pairs += growing * position + growing * (growing + 1) // 2 + (count - growing) * reach
            num_keys += min(end, reach + count - 1)
    return num_pairs, num_keys
