"""The text model of Gemma 4: wider heads in full layers, layers that read others' keys and values, per-layer inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_engine.errors import ConfigError
from hybrid_engine.kernels.attention import AttentionMeta
from hybrid_engine.kernels.norm import add_rms_norm, rms_norm
from hybrid_engine.models.base import FULL, ForwardBatch, LayerCache, LayerInfo, Model
from hybrid_engine.models.config import DecoderConfig, attention_row, kinds_of, positive, resolve, with_defaults
from hybrid_engine.models.decoder import Decoder, DecoderLayer, of_layer
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.mlp import GatedMlp
from hybrid_engine.models.layers.moe import Experts, top_then_softmax
from hybrid_engine.models.layers.norm import Norm
from hybrid_engine.models.layers.per_layer import PerLayerGate, PerLayerInputs
from hybrid_engine.models.layers.shared_attention import SharedAttention
from hybrid_engine.models.layers.weight import Vector
from hybrid_engine.weights.parts import Part

GEMMA4_DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "per_layer_config": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "sliding_window": 512,
    "layer_types": None,
    "final_logit_softcapping": None,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
    "rope_parameters": None,
}
ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}


@dataclass(frozen=True)
class Gemma4Config(DecoderConfig):
    """What its layers have of their own."""

    per_layer_size: int = 0
    """Of the vector that each layer gets beside the stream; 0: none."""
    per_layer_vocab_size: int = 0
    has_keys_as_values: bool = False
    """Whether full layers make values of what they project to keys."""
    has_wide_readers: bool = False
    """Whether MLPs are twice as wide where a layer reads another one's keys and values."""


def resolve_gemma4(config: Mapping[str, Any]) -> DecoderConfig:
    """Five windows to a full layer, the last one always full; the last layers may read what others keep."""
    values = with_defaults(config, GEMMA4_DEFAULTS | {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0})
    if values.get("use_bidirectional_attention") == "all":
        raise ConfigError("use_bidirectional_attention is 'all': an embedding model, which doesn't generate text")
    values["rope_parameters"] = values["rope_parameters"] or ROPE
    kinds = (*kinds_of(values, default_pattern=6)[:-1], FULL)
    num_experts = (values["num_experts"] or 0) if values["enable_moe_block"] else 0
    rows = tuple(
        replace(row(values, kind, index), index=index, num_experts=num_experts) for index, kind in enumerate(kinds)
    )
    base = resolve({**values, "rope_parameters": None}, kinds)
    base = replace(
        base,
        layers=with_readers(rows, values["num_kv_shared_layers"]),
        attention_scale=1.0,
        logits_softcap=values["final_logit_softcapping"],
        embedding_scale=values["hidden_size"] ** 0.5,
        has_qk_norm=True,
        has_qkv_bias=values["attention_bias"],
        has_output_bias=values["attention_bias"],
        num_experts_per_token=positive(values, "top_k_experts") if num_experts else 0,
        expert_intermediate_size=positive(values, "moe_intermediate_size") if num_experts else 0,
    )
    if base.num_experts_per_token > num_experts:
        raise ConfigError(f"top_k_experts is {base.num_experts_per_token}, must be at most num_experts ({num_experts})")
    return Gemma4Config(
        **vars(base),
        per_layer_size=values["hidden_size_per_layer_input"] or 0,
        per_layer_vocab_size=positive(values, "vocab_size_per_layer_input"),
        has_keys_as_values=values["attention_k_eq_v"],
        has_wide_readers=values["use_double_wide_mlp"],
    )


def row(values: Mapping[str, Any], kind: str, index: int) -> LayerInfo:
    """A layer's row. Full layers have sizes of their own, named for all of them or for each one."""
    own: dict[str, Any] = {}
    if values["per_layer_config"] is not None:
        own = dict(values["per_layer_config"].get(str(index)) or {})
        if foreign := sorted(own.keys() - {"head_dim", "num_key_value_heads"}):
            raise ConfigError(f"per_layer_config of layer {index} names {', '.join(foreign)}, which isn't read here")
    elif kind == FULL:
        own["head_dim"] = values["global_head_dim"]
        if values["attention_k_eq_v"] and values["num_global_key_value_heads"] is not None:
            own["num_key_value_heads"] = values["num_global_key_value_heads"]
    return attention_row({**values, **with_defaults(own, {})}, kind)


def with_readers(rows: Sequence[LayerInfo], num_readers: int) -> tuple[LayerInfo, ...]:
    """The table in which the last layers read what the last one of their kind before them keeps.

    Raises ConfigError when there is none, or none with heads like theirs.
    """
    kept = rows[: max(0, len(rows) - num_readers)]
    found = list(kept)
    for reader in rows[len(kept) :]:
        source = next((layer for layer in reversed(kept) if layer.kind == reader.kind), None)
        if source is None:
            raise ConfigError(
                f"num_kv_shared_layers is {num_readers}: no {reader.kind} layer is left whose keys and values layer "
                f"{reader.index} could read"
            )
        if replace(source, index=reader.index) != reader:
            raise ConfigError(f"layer {reader.index} is to read layer {source.index}, whose heads are others")
        found.append(replace(reader, reads_layer=source.index))
    return tuple(found)


class Gemma4Experts(nn.Module):
    """Experts beside the dense MLP, with norms around them and a router that norms and scales for itself."""

    def __init__(self, layer: str, info: LayerInfo, config: DecoderConfig) -> None:
        """layer: the layer's name in the checkpoint."""
        super().__init__()
        width, inner, num_experts = config.hidden_size, config.expert_intermediate_size, info.num_experts
        self.eps, self.num_chosen = config.norm_eps, config.num_experts_per_token
        self.router_scale = Vector(f"{layer}.router.scale", width)
        self.router = FusedLinear(width, {f"{layer}.router.proj": num_experts}, is_precious=True)
        self.expert_scale = Vector(f"{layer}.router.per_expert_scale", num_experts)
        self.pre_norm = Norm(f"{layer}.pre_feedforward_layernorm_2", width)
        self.experts = Experts(
            gate_up=(Part(f"{layer}.experts.gate_up_proj", (num_experts, 2 * inner, width)),),
            down=(Part(f"{layer}.experts.down_proj", (num_experts, width, inner)),),
            num_experts=num_experts,
            hidden_size=width,
            intermediate_size=inner,
            activation=config.activation,
        )
        self.dense_norm = Norm(f"{layer}.post_feedforward_layernorm_1", width)
        self.post_norm = Norm(f"{layer}.post_feedforward_layernorm_2", width)

    def forward(self, x_TE: Tensor, dense_TE: Tensor) -> Tensor:
        """[T, E]. x_TE: the stream before the MLP; dense_TE: the MLP's output."""
        scale_E = self.router_scale.weight_E * x_TE.shape[1] ** -0.5
        weights_TC, experts_TC = top_then_softmax(self.router(rms_norm(x_TE, scale_E, eps=self.eps)), self.num_chosen)
        weights_TC = weights_TC * self.expert_scale.weight_E[experts_TC]
        sparse_TE = self.experts(rms_norm(x_TE, self.pre_norm.weight_E, eps=self.eps), weights_TC, experts_TC)
        dense_TE = rms_norm(dense_TE, self.dense_norm.weight_E, eps=self.eps)
        return dense_TE + rms_norm(sparse_TE, self.post_norm.weight_E, eps=self.eps)


class Gemma4Layer(DecoderLayer):
    """Norms before and after each sublayer, then the layer's own input, then a factor on the whole stream."""

    def __init__(self, info: LayerInfo, config: DecoderConfig) -> None:
        super().__init__()
        assert isinstance(config, Gemma4Config), type(config)
        layer, width = f"model.layers.{info.index}", config.hidden_size
        self.eps = config.norm_eps
        has_values = not (config.has_keys_as_values and info.kind == FULL)
        self.attention = SharedAttention(f"{layer}.self_attn", info, config, has_values=has_values)
        is_wide = config.has_wide_readers and info.reads_layer is not None
        self.mlp = GatedMlp(
            f"{layer}.mlp",
            hidden_size=width,
            intermediate_size=config.intermediate_size * (2 if is_wide else 1),
            activation=config.activation,
            has_bias=False,
        )
        self.experts = Gemma4Experts(layer, info, config) if info.num_experts else None
        self.input_norm = Norm(f"{layer}.input_layernorm", width)
        self.post_attention_norm = Norm(f"{layer}.post_attention_layernorm", width)
        self.pre_mlp_norm = Norm(f"{layer}.pre_feedforward_layernorm", width)
        self.post_mlp_norm = Norm(f"{layer}.post_feedforward_layernorm", width)
        self.scale = Vector(f"{layer}.layer_scalar", 1)
        self.gate: PerLayerGate | None = None
        if config.per_layer_size:
            sizes = {"hidden_size": width, "size": config.per_layer_size}
            self.gate = PerLayerGate(layer, **sizes, activation=config.activation, eps=config.norm_eps)

    def forward(
        self,
        x_TE: Tensor,
        *,
        table: tuple[Tensor, Tensor],
        meta: AttentionMeta,
        cache: LayerCache,
        input_TP: Tensor | None,
    ) -> Tensor:
        """The residual stream behind this layer, [T, E]. input_TP: what this layer gets beside it."""
        normed_TE = rms_norm(x_TE, self.input_norm.weight_E, eps=self.eps)
        out_TE = self.attention(normed_TE, table=table, meta=meta, cache=cache)
        out_TE = rms_norm(out_TE, self.post_attention_norm.weight_E, eps=self.eps)
        normed_TE, x_TE = add_rms_norm(out_TE, x_TE, self.pre_mlp_norm.weight_E, eps=self.eps)
        out_TE = self.mlp(normed_TE)
        if self.experts is not None:
            out_TE = self.experts(x_TE, out_TE)
        x_TE = x_TE + rms_norm(out_TE, self.post_mlp_norm.weight_E, eps=self.eps)
        if self.gate is not None:
            x_TE = x_TE + self.gate(x_TE, input_TP)
        return x_TE * self.scale.weight_E.to(x_TE.dtype)

    def check(self, *rows: LayerInfo) -> None:
        """Assert that the loaded layer is what its row of the layer table says."""
        self.attention.check(*rows)


class Gemma4(Decoder):
    """A decoder whose layers get a vector each beside the stream."""

    def __init__(self, config: Gemma4Config, *, dtype: torch.dtype) -> None:
        super().__init__(config, Gemma4Layer, dtype=dtype)
        self.per_layer_inputs: PerLayerInputs | None = None
        if config.per_layer_size:
            self.per_layer_inputs = PerLayerInputs(
                vocab_size=config.per_layer_vocab_size,
                hidden_size=config.hidden_size,
                num_layers=len(config.layers),
                size=config.per_layer_size,
                eps=config.norm_eps,
            )
            self.info = self._describe()
        self.unused_weights = unused_by_readers(config.layers)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run the batch, write its keys and values into the caches: hidden_TE after the final norm."""
        tables = self.rope_tables(batch.positions_T)
        x_TE = self.embedding(batch.token_ids_T)
        inputs_TLP = None if self.per_layer_inputs is None else self.per_layer_inputs(batch.token_ids_T, x_TE)
        for index, layer in enumerate(self.layers):
            x_TE = layer(
                x_TE,
                table=tables[self.table_indices[index]],
                meta=of_layer(batch.metas, self.places[index]),
                cache=of_layer(batch.caches, self.places[index]),
                input_TP=None if inputs_TLP is None else inputs_TLP[:, index],
            )
        return rms_norm(x_TE, self.final_norm.weight_E, eps=self.config.norm_eps)


def unused_by_readers(layers: Sequence[LayerInfo]) -> tuple[str, ...]:
    """Patterns of tensors that checkpoints have and layers that read others' keys and values don't need."""
    readers = "|".join(str(layer.index) for layer in layers if layer.reads_layer is not None)
    return (rf"model\.layers\.({readers})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*",) if readers else ()


def build(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """A Gemma 4 without weights."""
    assert isinstance(config, Gemma4Config), type(config)
    return Gemma4(config, dtype=dtype)
