"""A GGUF file as a checkpoint: Hugging Face's names and values."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from hybrid_engine.weights.checkpoint import Checkpoint
from hybrid_engine.weights.gguf_config import read_config
from hybrid_engine.weights.gguf_file import GgufFile
from hybrid_engine.weights.parts import undo_interleaving

OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FFN_NORM = {"ffn_norm": "post_attention_layernorm"}
SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Gemma norms before and after each sublayer."""

CONFIG_TENSORS = ("rope_freqs.weight",)
"""Tensors that went into the config."""


class GgufCheckpoint(Checkpoint):
    """One GGUF file. What llama.cpp's converter did to names and values is undone."""

    def __init__(self, path: Path) -> None:
        """Read the header; raises CheckpointError when the file is cut short, UnknownModelError if it is foreign."""
        self.path = path
        self.file = GgufFile(path)
        self.config = read_config(self.file)
        self.architecture: str = self.file.metadata["general.architecture"]
        self._gguf_names = {
            hf_name(name, self.architecture): name for name in self.file.tensors if name not in CONFIG_TENSORS
        }

    def names(self) -> Iterable[str]:
        return self._gguf_names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.file.tensors[self._gguf_name(name)].shape

    def tensor(self, name: str, *, dtype: torch.dtype | None = None) -> Tensor:
        gguf_name = self._gguf_name(name)
        if self.architecture.startswith("gemma") and name.endswith("norm.weight"):
            # Stored as 1 + weight. The difference is taken in float32: in bfloat16 it would lose bits.
            return (self.file.tensor(gguf_name) - 1).to(dtype or torch.float32)
        tensor = self.file.tensor(gguf_name, dtype=dtype or torch.float32)
        if self.architecture == "llama" and (heads := self._rotated_heads(name)):
            return undo_interleaving(tensor, heads)
        return tensor

    def _gguf_name(self, name: str) -> str:
        if name not in self._gguf_names:
            raise self.missing(name)
        return self._gguf_names[name]

    def _rotated_heads(self, name: str) -> int | None:
        if ".q_proj." in name:
            return self.config["num_attention_heads"]
        return self.config.get("num_key_value_heads") if ".k_proj." in name else None


def hf_name(name: str, architecture: str) -> str:
    """Hugging Face's name of a GGUF tensor; an unknown name stays as it is and is refused when loaded."""
    base, _, suffix = name.rpartition(".")
    if base in OUTER_NAMES:
        return f"{OUTER_NAMES[base]}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", base)
    names = LAYER_NAMES | (SANDWICH_NORMS if architecture.startswith("gemma") else FFN_NORM)
    if match is None or match[2] not in names:
        return name
    return f"model.layers.{match[1]}.{names[match[2]]}.{suffix}"
