"""A novel as tokens: what a model says of it is as uneven as what it says of its users' texts."""

from __future__ import annotations

import lzma
from importlib.resources import files

from transformers import PreTrainedTokenizerBase


def prose_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of Jane Austen's Emma, without special ones."""
    packed = files("hybrid_engine.evals").joinpath("data/emma.txt.xz").read_bytes()
    return tokenizer(lzma.decompress(packed).decode(), add_special_tokens=False)["input_ids"]
