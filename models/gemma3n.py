"""The text model of Gemma 3n: several residual streams, layers that read others' keys and values, per-layer inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_engine.errors import ConfigError
from hybrid_engine.kernels.activation import act_mul
from hybrid_engine.kernels.attention import AttentionMeta
from hybrid_engine.kernels.norm import rms_norm
from hybrid_engine.models.base import ForwardBatch, LayerCache, LayerInfo, Model
from hybrid_engine.models.config import DecoderConfig, kinds_of, positive, resolve, with_defaults
from hybrid_engine.models.decoder import Decoder, DecoderLayer, of_layer
from hybrid_engine.models.fields import is_list
from hybrid_engine.models.gemma4 import unused_by_readers, with_readers
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.mlp import GatedMlp
from hybrid_engine.models.layers.norm import Norm
from hybrid_engine.models.layers.per_layer import PerLayerGate, PerLayerInputs
from hybrid_engine.models.layers.shared_attention import SharedAttention
from hybrid_engine.models.layers.weight import Vector

GEMMA3N_DEFAULTS = {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "sliding_window": 512,
    "layer_types": None,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
    "activation_sparsity_pattern": None,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
NUM_SPARSE, SPARSITY = 10, 0.95
"""Where a config of more than ten layers says nothing: its first ten keep a twentieth of their activations."""


@dataclass(frozen=True)
class Gemma3nConfig(DecoderConfig):
    """What its layers have of their own."""

    intermediate_sizes: tuple[int, ...] = ()
    """Of each layer's MLP."""
    sparsities: tuple[float, ...] = ()
    """Share of each layer's activations that are dropped."""
    per_layer_size: int = 0
    per_layer_vocab_size: int = 0
    num_streams: int = 1
    active_stream: int = 0
    """The one that layers work on; they predict the others and correct them."""
    has_output_scale: bool = True
    """Whether a layer's result is scaled before its own input is gated by it."""
    laurel_rank: int = 1


def resolve_gemma3n(config: Mapping[str, Any]) -> DecoderConfig:
    """Four windows to a full layer; the last layers read what the last of their kind before them keeps."""
    widths = config.get("intermediate_size", GEMMA3N_DEFAULTS["intermediate_size"])
    listed = list(widths) if is_list(widths) and widths else None
    values = with_defaults({**config, "intermediate_size": listed[0] if listed else widths}, GEMMA3N_DEFAULTS)
    num_layers = positive(values, "num_hidden_layers")
    each = [with_defaults({"intermediate_size": width}, {})["intermediate_size"] for width in listed or []]
    sparsities = values["activation_sparsity_pattern"]
    if sparsities is None:
        num_sparse = NUM_SPARSE if num_layers > NUM_SPARSE else 0
        sparsities = (SPARSITY,) * num_sparse + (0.0,) * (num_layers - num_sparse)
    for key, entries in (("intermediate_size", each or (0,) * num_layers), ("activation_sparsity_pattern", sparsities)):
        if len(entries) != num_layers:
            raise ConfigError(f"{key} has {len(entries)} entries, must have one for each of the {num_layers} layers")
    num_streams, active = positive(values, "altup_num_inputs"), values["altup_active_idx"]
    if active >= num_streams:
        raise ConfigError(f"altup_active_idx is {active}, must be below altup_num_inputs ({num_streams})")
    base = resolve(values, kinds_of(values, default_pattern=5))
    base = replace(
        base,
        layers=with_readers(base.layers, values["num_kv_shared_layers"]),
        attention_scale=1.0,
        logits_softcap=values["final_logit_softcapping"],
        embedding_scale=values["hidden_size"] ** 0.5,
        has_qk_norm=True,
        has_qkv_bias=values["attention_bias"],
        has_output_bias=values["attention_bias"],
    )
    return Gemma3nConfig(
        **vars(base),
        intermediate_sizes=tuple(each) or (base.intermediate_size,) * num_layers,
        sparsities=tuple(sparsities),
        per_layer_size=positive(values, "hidden_size_per_layer_input"),
        per_layer_vocab_size=positive(values, "vocab_size_per_layer_input"),
        num_streams=num_streams,
        active_stream=active,
        has_output_scale=values["altup_correct_scale"],
        laurel_rank=positive(values, "laurel_rank"),
    )


class SparseMlp(GatedMlp):
    """Of the gate only what lies above a bound is used, a share that a normal distribution of its values would have."""

    def __init__(
        self, name: str, *, sparsity: float, hidden_size: int, intermediate_size: int, activation: str
    ) -> None:
        super().__init__(
            name,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            activation=activation,
            has_bias=False,
        )
        self.deviations = torch.distributions.Normal(0, 1).icdf(torch.tensor(sparsity)).item() if sparsity else None

    def forward(self, x_TE: Tensor) -> Tensor:
        """[T, E]."""
        if self.deviations is None:
            return super().forward(x_TE)
        gate_TI, up_TI = self.gate_up(x_TE).chunk(2, 1)
        bound_T1 = gate_TI.mean(1, keepdim=True) + gate_TI.std(1, keepdim=True, unbiased=False) * self.deviations
        return self.down(act_mul(torch.cat([(gate_TI - bound_T1).relu(), up_TI], 1), kind=self.activation))


class AltUp(nn.Module):
    """Several residual streams, of which a layer works on one: it predicts them all, then corrects them all.

    Source: Alternating Updates (arXiv 2301.13310). Streams are [A, T, E], A of them.
    """

    def __init__(self, layer: str, config: Gemma3nConfig) -> None:
        """layer: the layer's name in the checkpoint."""
        super().__init__()
        name, width, num_streams = f"{layer}.altup", config.hidden_size, config.num_streams
        self.active, self.num_streams, self.eps = config.active_stream, num_streams, config.norm_eps
        self.router_norm = Norm(f"{name}.router_norm", width)
        self.router = FusedLinear(width, {f"{name}.modality_router": num_streams}, is_precious=True)
        self.prediction = FusedLinear(num_streams, {f"{name}.prediction_coefs": num_streams**2}, is_precious=True)
        self.correction = FusedLinear(num_streams, {f"{name}.correction_coefs": num_streams}, is_precious=True)
        self.output_scale = Vector(f"{name}.correct_output_scale", width)

    def predict(self, streams_ATE: Tensor) -> Tensor:
        """What the layer is expected to make of the streams, [A, T, E]."""
        mix_TA = self._mix(streams_ATE[self.active])
        coefficients = self.prediction(mix_TA).unflatten(1, (self.num_streams, self.num_streams))
        return streams_ATE + torch.einsum("jte,tij->ite", streams_ATE, coefficients)

    def correct(self, predicted_ATE: Tensor, result_TE: Tensor) -> Tensor:
        """Move every stream by the error of the one that the layer has really computed, [A, T, E]."""
        coefficients_TA = self.correction(self._mix(result_TE)) + 1
        return predicted_ATE + (result_TE - predicted_ATE[self.active]) * coefficients_TA.T[:, :, None]

    def _mix(self, x_TE: Tensor) -> Tensor:
        routed_TA = self.router(rms_norm(x_TE, self.router_norm.weight_E, eps=self.eps) / x_TE.shape[1])
        return routed_TA.float().tanh().to(x_TE.dtype)


class Gemma3nLayer(DecoderLayer):
    """Attention with a small projection beside it, an MLP, the layer's own input."""

    def __init__(self, info: LayerInfo, config: DecoderConfig) -> None:
        super().__init__()
        assert isinstance(config, Gemma3nConfig), type(config)
        layer, width, self.eps = f"model.layers.{info.index}", config.hidden_size, config.norm_eps
        self.has_output_scale = config.has_output_scale
        self.altup = AltUp(layer, config)
        self.laurel_left = FusedLinear(width, {f"{layer}.laurel.linear_left": config.laurel_rank})
        self.laurel_right = FusedLinear(config.laurel_rank, {f"{layer}.laurel.linear_right": width})
        self.laurel_norm = Norm(f"{layer}.laurel.post_laurel_norm", width)
        self.attention = SharedAttention(f"{layer}.self_attn", info, config)
        self.mlp = SparseMlp(
            f"{layer}.mlp",
            sparsity=config.sparsities[info.index],
            hidden_size=width,
            intermediate_size=config.intermediate_sizes[info.index],
            activation=config.activation,
        )
        self.input_norm = Norm(f"{layer}.input_layernorm", width)
        self.post_attention_norm = Norm(f"{layer}.post_attention_layernorm", width)
        self.pre_mlp_norm = Norm(f"{layer}.pre_feedforward_layernorm", width)
        self.post_mlp_norm = Norm(f"{layer}.post_feedforward_layernorm", width)
        sizes = {"hidden_size": width, "size": config.per_layer_size}
        self.gate = PerLayerGate(layer, **sizes, activation=config.activation, eps=config.norm_eps)

    def forward(
        self,
        streams_ATE: Tensor,
        *,
        table: tuple[Tensor, Tensor],
        meta: AttentionMeta,
        cache: LayerCache,
        input_TP: Tensor,
    ) -> Tensor:
        """The streams behind this layer, [A, T, E]. input_TP: what this layer gets beside them."""
        predicted_ATE = self.altup.predict(streams_ATE)
        active_TE = predicted_ATE[self.altup.active]
        normed_TE = rms_norm(active_TE, self.input_norm.weight_E, eps=self.eps)
        small_TE = self.laurel_right(self.laurel_left(normed_TE))
        laurel_TE = normed_TE + rms_norm(small_TE, self.laurel_norm.weight_E, eps=self.eps)
        out_TE = self.attention(normed_TE, table=table, meta=meta, cache=cache)
        out_TE = rms_norm(out_TE, self.post_attention_norm.weight_E, eps=self.eps)
        x_TE = (active_TE + out_TE + laurel_TE) * 2**-0.5
        out_TE = self.mlp(rms_norm(x_TE, self.pre_mlp_norm.weight_E, eps=self.eps))
        x_TE = x_TE + rms_norm(out_TE, self.post_mlp_norm.weight_E, eps=self.eps)
        corrected_ATE = self.altup.correct(predicted_ATE, x_TE)
        first_TE = corrected_ATE[self.altup.active]
        if self.has_output_scale:
            first_TE = (first_TE * self.altup.output_scale.weight_E).to(x_TE.dtype)
        corrected_ATE[1:] += self.gate(first_TE, input_TP)
        return corrected_ATE

    def check(self, *rows: LayerInfo) -> None:
        """Assert that the loaded layer is what its row of the layer table says."""
        self.attention.check(*rows)


class Gemma3n(Decoder):
    """Streams are made of the embedding, and made one again behind the last layer."""

    def __init__(self, config: Gemma3nConfig, *, dtype: torch.dtype) -> None:
        super().__init__(config, Gemma3nLayer, dtype=dtype)
        width, others = config.hidden_size, range(config.num_streams - 1)
        self.per_layer_inputs = PerLayerInputs(
            vocab_size=config.per_layer_vocab_size,
            hidden_size=width,
            num_layers=len(config.layers),
            size=config.per_layer_size,
            eps=config.norm_eps,
        )
        self.enter = nn.ModuleList(FusedLinear(width, {f"model.altup_projections.{i}": width}) for i in others)
        self.leave = nn.ModuleList(FusedLinear(width, {f"model.altup_unembed_projections.{i}": width}) for i in others)
        self.unused_weights = unused_by_readers(config.layers)
        self.info = self._describe()

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run the batch, write its keys and values into the caches: hidden_TE after the final norm."""
        tables = self.rope_tables(batch.positions_T)
        x_TE = self.embedding(batch.token_ids_T)
        inputs_TLP = self.per_layer_inputs(batch.token_ids_T, x_TE)
        streams_ATE = torch.stack([x_TE, *(with_magnitude(enter(x_TE), x_TE) for enter in self.enter)])
        for index, layer in enumerate(self.layers):
            streams_ATE = layer(
                streams_ATE,
                table=tables[self.table_indices[index]],
                meta=of_layer(batch.metas, self.places[index]),
                cache=of_layer(batch.caches, self.places[index]),
                input_TP=inputs_TLP[:, index],
            )
        first_TE, *others = streams_ATE
        left = [with_magnitude(leave(x_TE), first_TE) for leave, x_TE in zip(self.leave, others, strict=True)]
        mean_TE = torch.stack([first_TE, *left]).mean(0)
        return rms_norm(mean_TE, self.final_norm.weight_E, eps=self.config.norm_eps)


def with_magnitude(x_TE: Tensor, like_TE: Tensor) -> Tensor:
    """x, scaled so that the mean of its squares is that of another tensor."""
    wanted_T1 = like_TE.square().mean(1, keepdim=True).sqrt()
    return x_TE * wanted_T1 / x_TE.square().mean(1, keepdim=True).clamp(min=1e-5).sqrt()


def build(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """A Gemma 3n without weights."""
    assert isinstance(config, Gemma3nConfig), type(config)
    return Gemma3n(config, dtype=dtype)
