"""From config.json, in the old and the new way of writing it, to what the layers are built from.

transformers 5 writes `layer_types` and `rope_parameters` (flat or by kind of layer); checkpoints on disk mostly
carry `sliding_window_pattern`, `rope_theta`, `rope_local_base_freq` and `rope_scaling`. Values that a config leaves
out are those of transformers' config classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybrid_engine.errors import ConfigError
from hybrid_engine.models.base import (
    CHUNKED,
    DELTA_NET,
    FULL,
    LIGHTNING,
    MAMBA,
    MAMBA2,
    MLP,
    RECURRENT,
    RG_LRU,
    SLIDING,
    DeltaNetInfo,
    LayerInfo,
    LightningInfo,
    MambaInfo,
    RgLruInfo,
    ShortConvInfo,
)
from hybrid_engine.models.fields import COUNT, FIELDS, FIELDS_INSIDE, check_field, check_fields
from hybrid_engine.models.layers.rope import NO_ROPE
from hybrid_engine.models.rope_config import rope_of

ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "swish": "silu"}
"""config.json's names -> the kernels'."""

LEGACY_KINDS = {"attention": FULL}
"""Names that older configs use in layer_types."""
RECURRENT_NAMES = ("mamba", "linear_attention")
"""What configs call a recurrent layer, before and since transformers 5."""


@dataclass(frozen=True)
class Names:
    """What a checkpoint calls the parts of a decoder."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    input_norm: str = "input_layernorm"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    attention_out: str = "o_proj"
    sinks: str = "sinks"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    mamba: str = "mamba"
    short_conv: str = "conv"
    delta_net: str = "linear_attn"
    pre_mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    mlp_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    mlp_down: str = "down_proj"
    final_norm: str = "model.norm"


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder of attention or recurrent layers and MLPs, every choice made."""

    architecture: str
    """The config's model_type."""
    layers: tuple[LayerInfo, ...]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_position_embeddings: int
    norm_eps: float
    activation: str
    """"gelu", "gelu_tanh" or "silu"."""
    attention_scale: float
    is_tied: bool
    """Whether the head is the embedding table."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embedding_scale: float | None = None
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    has_attention_gate: bool = False
    """Whether each head's output is multiplied by a sigmoid of the layer's input (Lfm3)."""
    has_interleaved_rope: bool = False
    """Whether a head's elements 2 i and 2 i + 1 turn together in the checkpoint; ours are i and i + D / 2."""
    value_scale: float | None = None
    """What values are multiplied with (MiMo)."""
    has_sandwich_norms: bool = False
    """Whether a sublayer's output is normed before it is added to the residual stream (Lfm3)."""
    has_zero_centered_norms: bool = False
    """Whether norms multiply by 1 + weight."""
    has_float32_residual: bool = False
    """Whether the residual stream is kept in float32 whatever the model's dtype (Mamba)."""
    residual_scale: float | None = None
    """What each sublayer's output is multiplied with before it is added to the residual stream (Granite)."""
    logits_divisor: float | None = None
    """What logits are divided by (Granite)."""
    num_experts_per_token: int = 0
    """Where layers have experts."""
    expert_intermediate_size: int = 0
    """Width of an expert where it differs from that of a dense MLP."""
    shared_intermediate_size: int = 0
    """Width of the MLP that every token goes through beside its experts."""
    names: Names = Names()


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a config; a multimodal one nests it and keeps some ids outside."""
    if "text_config" not in config:
        return dict(config)
    check_field(config, "text_config", FIELDS_INSIDE)
    shared = ("eos_token_id", "bos_token_id", "tie_word_embeddings")
    return {**config["text_config"], **{key: config[key] for key in shared if key in config}}


def with_defaults(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A config in which absent keys have the value of the architecture's config class; null stays null.

    Raises ConfigError for a value that no architecture could mean.
    """
    assert defaults.keys() <= FIELDS.keys(), f"no rule for {sorted(defaults.keys() - FIELDS.keys())}"
    values = {**defaults, **config}
    check_fields(values)
    return values


def resolve(
    values: Mapping[str, Any],
    kinds: tuple[str, ...],
    *,
    mamba: MambaInfo | None = None,
    short_conv: ShortConvInfo | None = None,
    delta_net: DeltaNetInfo | None = None,
    lightning: LightningInfo | None = None,
    rg_lru: RgLruInfo | None = None,
) -> DecoderConfig:
    """What every decoder has; architectures replace the fields in which they differ.

    values: a text config with its defaults filled in. kinds: each layer's kind. mamba, short_conv and so on:
    what its recurrent layers are. Raises ConfigError for a value that can't be or isn't supported.
    """
    recurrent = {
        "mamba": mamba,
        "short_conv": short_conv,
        "delta_net": delta_net,
        "lightning": lightning,
        "rg_lru": rg_lru,
    }
    layers = layer_table(values, kinds, recurrent)
    if any((mamba, delta_net, lightning)) and activation_of(values) != "silu":
        raise ConfigError(f"the activation is {values['hidden_act']!r}, the recurrent layers want silu")
    if mamba is not None and mamba.num_heads % mamba.num_groups:
        raise ConfigError(f"{mamba.num_heads} Mamba-2 heads can't share {mamba.num_groups} groups: must be a multiple")
    head_sizes = {layer.head_size for layer in layers if layer.num_heads}
    assert len(head_sizes) <= 1, head_sizes
    return DecoderConfig(
        architecture=values["model_type"],
        layers=layers,
        vocab_size=positive(values, "vocab_size"),
        hidden_size=positive(values, "hidden_size"),
        intermediate_size=positive(values, "intermediate_size"),
        max_position_embeddings=positive(values, "max_position_embeddings"),
        norm_eps=values["rms_norm_eps"],
        activation=activation_of(values),
        attention_scale=max(head_sizes, default=1) ** -0.5,
        is_tied=bool(values["tie_word_embeddings"]),
        eos_token_ids=token_ids(values.get("eos_token_id")),
        bos_token_id=values.get("bos_token_id"),
    )


def layer_table(
    values: Mapping[str, Any], kinds: tuple[str, ...], recurrent: Mapping[str, Any]
) -> tuple[LayerInfo, ...]:
    """One row a layer. recurrent: what the model's recurrent layers are, by the row's field."""
    rows = {kind: attention_row(values, kind) for kind in set(kinds) - {*RECURRENT, MLP}}
    rows[MLP] = LayerInfo(index=-1, kind=MLP)
    for kind in set(kinds) & set(RECURRENT):
        rows[kind] = LayerInfo(index=-1, kind=kind, **recurrent)
    return tuple(replace(rows[kind], index=index) for index, kind in enumerate(kinds))


def attention_row(values: Mapping[str, Any], kind: str) -> LayerInfo:
    """What attention layers of a kind have in common; the index is to be set."""
    num_heads = positive(values, "num_attention_heads")
    num_kv_heads = values.get("num_key_value_heads") or num_heads
    hidden_size = positive(values, "hidden_size")
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_attention_heads is {num_heads}, must be a multiple of num_key_value_heads ({num_kv_heads})"
        )
    head_size = values.get("head_dim") or hidden_size // num_heads
    if head_size == 0:
        raise ConfigError(f"num_attention_heads is {num_heads}, must be at most hidden_size ({hidden_size})")
    return LayerInfo(
        index=-1,
        kind=kind,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rope=rope_of(values, kind, head_size=head_size),
        window=positive(values, "sliding_window") if kind == SLIDING else None,
        chunk=positive(values, "attention_chunk_size") if kind == CHUNKED else None,
    )


def without_rope(config: DecoderConfig, kind: str) -> DecoderConfig:
    """The config with layers of a kind that know no positions."""
    layers = tuple(replace(layer, rope=NO_ROPE) if layer.kind == kind else layer for layer in config.layers)
    return replace(config, layers=layers)


def with_interleaved_rope(config: DecoderConfig) -> DecoderConfig:
    """The config of a model whose checkpoint has elements that turn together side by side.

    Raises ConfigError where heads turn in part: no such model is known here.
    """
    for layer in config.layers:
        if layer.rope.rotary_size not in (0, layer.head_size):
            raise ConfigError(
                f"{layer.rope.rotary_size} of a head's {layer.head_size} elements are to turn, must be all"
            )
    return replace(config, has_interleaved_rope=True)


def kinds_of(values: Mapping[str, Any], *, default_pattern: int) -> tuple[str, ...]:
    """Each layer's kind: `layer_types`, or every pattern-th layer full and the others sliding.

    The pattern may be a list, as newer GGUF files have it: true for a sliding layer, repeated over the layers.
    """
    num_layers = positive(values, "num_hidden_layers")
    if values.get("layer_types") is not None:
        return listed_kinds(values["layer_types"], num_layers)
    pattern = values.get("sliding_window_pattern") or values.get("_sliding_window_pattern") or default_pattern
    if not isinstance(pattern, int):
        return tuple(SLIDING if pattern[index % len(pattern)] else FULL for index in range(num_layers))
    return tuple(SLIDING if (index + 1) % pattern else FULL for index in range(num_layers))


def listed_kinds(
    layer_types: Sequence[str], num_layers: int, *, known: tuple[str, ...] = (FULL, SLIDING)
) -> tuple[str, ...]:
    """`layer_types`, checked. known: the kinds that the architecture has; at most one of them is recurrent."""
    mambas = [kind for kind in known if kind in (MAMBA, MAMBA2, DELTA_NET, LIGHTNING, RG_LRU)]
    names = {**LEGACY_KINDS, **{name: kind for kind in mambas for name in RECURRENT_NAMES}}
    kinds = tuple(names.get(kind, kind) for kind in layer_types)
    if len(kinds) != num_layers:
        raise ConfigError(f"layer_types has {len(kinds)} entries, must have one for each of the {num_layers} layers")
    if foreign := sorted(set(kinds) - set(known)):
        raise ConfigError(f"layer_types holds {', '.join(foreign)}; known here: {', '.join(known)}")
    return kinds


def hybrid_kinds(values: Mapping[str, Any], *, recurrent: str, is_attention: Callable[[int], bool]) -> tuple[str, ...]:
    """Each layer's kind: a list where the config has one, else what the architecture's older attributes say.

    recurrent: the kind of the layers for which is_attention, asked by index, is false.
    """
    num_layers = positive(values, "num_hidden_layers")
    for key in ("layer_types", "layers_block_type"):
        if values.get(key) is not None:
            return listed_kinds(values[key], num_layers, known=(FULL, recurrent))
    return tuple(FULL if is_attention(index) else recurrent for index in range(num_layers))


def experts_per_token(values: Mapping[str, Any], num_experts: int) -> int:
    """How many experts a token goes through. Raises ConfigError when there aren't so many."""
    num_chosen = positive(values, "num_experts_per_tok")
    if 1 < num_experts < num_chosen:
        raise ConfigError(f"num_experts_per_tok is {num_chosen}, must be at most the number of experts ({num_experts})")
    return num_chosen


def activation_of(values: Mapping[str, Any]) -> str:
    """The kernels' name of the MLP's activation."""
    name = values.get("hidden_activation") or values.get("hidden_act")
    if name not in ACTIVATIONS:
        raise ConfigError(f"the activation is {name!r}, must be one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """One id, several or none, as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def positive(values: Mapping[str, Any], key: str) -> int:
    """A count from a config. Raises ConfigError when it is missing or not a whole number above 0."""
    check_field(values, key, COUNT)
    return values[key]
