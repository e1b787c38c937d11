"""What a GGUF file's metadata says, in the words of config.json.

llama.cpp knows some values from the architecture alone; they stand here as it has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybrid_engine.errors import UnknownModelError
from hybrid_engine.weights.gguf_file import GgufFile

COMMON_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}
"""llama.cpp's key, below the architecture's name -> config.json's."""


def read_config(file: GgufFile) -> dict[str, Any]:
    """The config that config.json would hold.

    Raises UnknownModelError for an architecture that isn't mapped here.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnknownModelError(f"{file.path} is of architecture {architecture!r}; GGUF files read here: {known}")
    config = _common(file, architecture)
    values = {
        key.removeprefix(f"{architecture}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{architecture}.")
    }
    return config | ARCHITECTURES[architecture](values, config, file)


def _common(file: GgufFile, architecture: str) -> dict[str, Any]:
    metadata = file.metadata
    config = {
        name: metadata[f"{architecture}.{key}"]
        for key, name in COMMON_KEYS.items()
        if f"{architecture}.{key}" in metadata
    }
    config["model_type"] = architecture
    config["vocab_size"] = file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 0
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    # "eot" ends a turn, "eom" a message: a chat model stops at each.
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    config["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None))
    config["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    return config


def _rope_scaling(values: dict[str, Any], file: GgufFile) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:  # Llama 3.1's scaling, as one divisor for each frequency
        return {"rope_type": "divisors", "divisors": file.tensor("rope_freqs.weight").tolist()}
    kind = values.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": values.get("rope.scaling.factor", 1.0)}
    if "rope.scaling.original_context_length" in values:
        scaling["original_max_position_embeddings"] = values["rope.scaling.original_context_length"]
    if "rope.scaling.attn_factor" in values:
        scaling["attention_factor"] = values["rope.scaling.attn_factor"]
    return scaling


def _decoder(values: dict[str, Any], config: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    head_size = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return {
        "head_dim": head_size,
        "partial_rotary_factor": values.get("rope.dimension_count", head_size) / head_size,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "rope_scaling": _rope_scaling(values, file),
    }


def _gemma2(values: dict[str, Any], config: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": values.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": values.get("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(config, layers_of_27b=46),
    }


def _gemma3(values: dict[str, Any], config: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    return {
        "model_type": "gemma3_text",
        "sliding_window_pattern": values.get("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": values.get("rope.freq_base_swa", 10_000.0),
        "rope_scaling": _rope_scaling(values, file),
        "final_logit_softcapping": values.get("final_logit_softcapping"),
        "query_pre_attn_scalar": _query_scalar(config, layers_of_27b=62),
    }


def _query_scalar(config: dict[str, Any], *, layers_of_27b: int) -> float:
    # The file doesn't say; only the 27B of each family differs, and llama.cpp knows it by its number of layers.
    if config["num_hidden_layers"] == layers_of_27b:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


ARCHITECTURES: dict[str, Callable[[dict[str, Any], dict[str, Any], GgufFile], dict[str, Any]]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "llama": _decoder,
    "qwen2": _decoder,
    "qwen3": _decoder,
}
"""general.architecture -> what it adds to the common part."""
