"""Which architecture reads which checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_engine.errors import ConfigError, UnknownModelError
from hybrid_engine.models import (
    bamba,
    cohere,
    falcon_h1,
    gemma,
    gemma3n,
    gemma4,
    gpt_oss,
    granite_swa,
    jamba,
    kimi_linear,
    lfm,
    lfm_moe,
    llama,
    llama4,
    mamba,
    mimo,
    minimax,
    nemotron_h,
    olmo,
    olmo_hybrid,
    phi,
    qwen_next,
    recurrent_gemma,
    sparse,
    three_kinds,
    zamba,
    zamba2,
)
from hybrid_engine.models.base import Model, ModelInfo
from hybrid_engine.models.config import DecoderConfig, text_config
from hybrid_engine.weights.checkpoint import Checkpoint
from hybrid_engine.weights.dequantised import dequantised, quant_method
from hybrid_engine.weights.loader import load_weights

DTYPES = (torch.float32, torch.bfloat16)
"""What models compute in."""


@dataclass(frozen=True)
class Architecture:
    """How a config is read and a model built from it."""

    resolve: Callable[[Mapping[str, Any]], DecoderConfig]
    build: Callable[[DecoderConfig, torch.dtype], Model]


ARCHITECTURES = {
    "bamba": Architecture(bamba.resolve_bamba, bamba.build_bamba),
    "cohere2": Architecture(cohere.resolve_cohere2, cohere.build),
    "exaone4": Architecture(olmo.resolve_exaone4, olmo.build_exaone4),
    "falcon_h1": Architecture(falcon_h1.resolve_falcon_h1, falcon_h1.build),
    "falcon_mamba": Architecture(mamba.resolve_falcon_mamba, mamba.build),
    "gemma2": Architecture(gemma.resolve_gemma2, gemma.build),
    "gemma3_text": Architecture(gemma.resolve_gemma3, gemma.build),
    "gemma3n_text": Architecture(gemma3n.resolve_gemma3n, gemma3n.build),
    "gemma4_text": Architecture(gemma4.resolve_gemma4, gemma4.build),
    "gpt_oss": Architecture(gpt_oss.resolve_gpt_oss, gpt_oss.build),
    "granite_swa": Architecture(granite_swa.resolve_granite_swa, granite_swa.build),
    "granitemoehybrid": Architecture(bamba.resolve_granite, bamba.build_granite),
    "jamba": Architecture(jamba.resolve_jamba, jamba.build),
    "kimi_linear": Architecture(kimi_linear.resolve_kimi_linear, kimi_linear.build),
    "lfm2": Architecture(lfm.resolve_lfm2, lfm.build),
    "lfm2_moe": Architecture(lfm_moe.resolve_lfm2_moe, lfm_moe.build),
    "lfm3": Architecture(lfm.resolve_lfm3, lfm.build),
    "llama": Architecture(llama.resolve_llama, llama.build),
    "llama4_text": Architecture(llama4.resolve_llama4, llama4.build),
    "mamba": Architecture(mamba.resolve_mamba, mamba.build),
    "mamba2": Architecture(mamba.resolve_mamba2, mamba.build),
    "mimo_v2_flash": Architecture(mimo.resolve_mimo, mimo.build),
    "minimax": Architecture(minimax.resolve_minimax, minimax.build),
    "ministral": Architecture(llama.resolve_ministral, llama.build),
    "mistral": Architecture(llama.resolve_mistral, llama.build),
    "mixtral": Architecture(sparse.resolve_mixtral, sparse.build),
    "nemotron_h": Architecture(nemotron_h.resolve_nemotron_h, nemotron_h.build),
    "olmo3": Architecture(olmo.resolve_olmo3, olmo.build_olmo3),
    "olmo_hybrid": Architecture(olmo_hybrid.resolve_olmo_hybrid, olmo_hybrid.build),
    "phi3": Architecture(phi.resolve_phi3, phi.build),
    "qwen2": Architecture(llama.resolve_qwen2, llama.build),
    "qwen3": Architecture(llama.resolve_qwen3, llama.build),
    "qwen3_5_moe_text": Architecture(qwen_next.resolve_qwen3_5_moe, qwen_next.build),
    "qwen3_5_text": Architecture(qwen_next.resolve_qwen3_5, qwen_next.build),
    "qwen3_next": Architecture(qwen_next.resolve_qwen3_next, qwen_next.build_next),
    "qwen3_moe": Architecture(sparse.resolve_qwen3_moe, sparse.build),
    "recurrent_gemma": Architecture(recurrent_gemma.resolve_recurrent_gemma, recurrent_gemma.build),
    "three_kinds": Architecture(three_kinds.resolve_three_kinds, three_kinds.build),
    "zamba": Architecture(zamba.resolve_zamba, zamba2.build),
    "zamba2": Architecture(zamba2.resolve_zamba2, zamba2.build),
}
"""By the model_type of the config or, in a multimodal one, of its text_config."""


def build_model(config: Mapping[str, Any], *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Model:
    """A model without weights, from a config.json's content.

    Raises UnknownModelError when no architecture of ours reads it, ConfigError when a value is out of range.
    """
    if dtype not in DTYPES:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ConfigError(f"dtype is {str(dtype).removeprefix('torch.')}, must be {allowed}")
    if not isinstance(config, Mapping):
        raise ConfigError(f"the model's config is a {type(config).__name__}, must be an object")
    values = text_config(config)
    quant_method(config)
    if is_generic(values):
        from hybrid_engine.models import generic  # it brings much of transformers along

        return generic.describe(values, dtype=dtype)
    architecture = ARCHITECTURES[values["model_type"]]
    return architecture.build(architecture.resolve(values), dtype).to(device)


def is_generic(values: Mapping[str, Any]) -> bool:
    """Whether transformers' own code is to run a model, as none of our files does.

    Raises UnknownModelError when transformers doesn't know it either.
    """
    kind = values.get("model_type")
    if isinstance(kind, str) and kind in ARCHITECTURES:
        return False
    from transformers import CONFIG_MAPPING

    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise UnknownModelError(f"no architecture here reads model_type {kind!r}; known: {', '.join(ARCHITECTURES)}")
    return True


def check_quantizable(config: Mapping[str, Any], quantization: str | None) -> None:
    """Raise ConfigError for a model whose weights can't be kept in fewer bits, because their code isn't ours."""
    values = text_config(config)
    if quantization is not None and is_generic(values):
        raise ConfigError(
            f"quantization is {quantization!r}, which model_type {values['model_type']!r} can't have, since "
            f"transformers' own code runs it: leave quantization out"
        )


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    quantization: str | None = None,
    exact: bool = False,
) -> Model:
    """Build a model and fill it from a checkpoint, every tensor accounted for.

    quantization: how linear weights are kept, one of kernels.linear.QUANTIZATIONS; None: in dtype.
    exact: as Model.is_exact.
    Raises CheckpointError when a tensor is missing, of the wrong shape or left over, ConfigError when the model's
    weights can't be kept so.
    """
    check_quantizable(checkpoint.config, quantization)
    values = text_config(checkpoint.config)
    if is_generic(values):
        from hybrid_engine.models import generic

        return generic.load(checkpoint, values, dtype=dtype, device=device)
    checkpoint = dequantised(checkpoint)
    model = build_model(checkpoint.config, dtype=dtype, device=device)
    model.keep_weights_as(quantization, exact=exact)
    load_weights(model.weights(), checkpoint, dtype=dtype, device=device, unused=model.unused_weights)
    model.check_layers()
    return model.eval()


def describe_model(config: Mapping[str, Any]) -> ModelInfo:
    """The layer table and what the layers keep, without any weights."""
    return build_model(config, dtype=torch.bfloat16).info
