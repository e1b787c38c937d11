"""The tokenizer of a checkpoint: from tokenizer.json beside the weights, or built from a GGUF file once and kept.

Gemma's is built here in four seconds and is the same, byte for byte, as transformers' conversion of the file, which
takes half a minute; other vocabularies go through transformers. Either way the result is kept in the user's cache
folder ($XDG_CACHE_HOME or ~/.cache, below hybrid-engine/tokenizers), under a hash of the file's header.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hybrid_engine.errors import CheckpointError
from hybrid_engine.weights.checkpoint import find_gguf
from hybrid_engine.weights.gguf_file import GgufFile

logger = logging.getLogger(__name__)

BUILD_VERSION = 1
"""Part of the cache's key: raise it when what is built changes."""

SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
CONTROL, USER_DEFINED = 3, 4
"""GGUF token types: never in text unless written out; matched whole before any merging."""


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint: a folder, or a .gguf file.

    Raises CheckpointError when there is none or it can't be read.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} doesn't exist: give a folder with a tokenizer, or a .gguf file")
    folder = path if path.is_dir() else path.parent
    if (folder / "tokenizer.json").exists():
        return _read(PreTrainedTokenizerFast, folder)
    if path.is_dir() and ((path / "tokenizer.model").exists() or (path / "vocab.json").exists()):
        return _read(AutoTokenizer, path)
    if path.is_dir() and not any(path.glob("*.gguf")):
        raise CheckpointError(f"{path} holds no tokenizer: tokenizer.json, tokenizer.model or a .gguf file is needed")
    return _from_gguf(path if path.is_file() else find_gguf(path))


def _read(tokenizer_class: Any, folder: Path) -> PreTrainedTokenizerBase:
    try:
        return tokenizer_class.from_pretrained(folder)
    except Exception as error:  # tokenizers raises nothing narrower, transformers whatever a missing key leads to
        raise CheckpointError(
            f"the tokenizer in {folder} can't be read ({type(error).__name__}: {error}): its files are incomplete or "
            f"damaged"
        ) from error


def cache_folder() -> Path:
    """Where built tokenizers are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hybrid-engine" / "tokenizers"


def _from_gguf(path: Path) -> PreTrainedTokenizerBase:
    file = GgufFile(path)
    key = hashlib.blake2b(file.header(), digest_size=16, salt=BUILD_VERSION.to_bytes(16, "little")).hexdigest()
    kept = cache_folder() / key
    if not kept.exists():
        tokenizer = build(file)
        try:
            _keep(tokenizer, kept)
        except OSError as error:
            logger.warning(
                "the tokenizer of %s can't be kept in %s (%s): it is built anew each time", path, kept, error
            )
            return tokenizer
    return PreTrainedTokenizerFast.from_pretrained(kept)


def _keep(tokenizer: PreTrainedTokenizerBase, kept: Path) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="build-", dir=kept.parent))
    try:
        tokenizer.save_pretrained(scratch)
        scratch.rename(kept)  # atomic: a reader sees all files or none
    except OSError:
        if not kept.exists():  # otherwise another process was first, with the same content
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def build(file: GgufFile) -> PreTrainedTokenizerBase:
    """Build the tokenizer that a GGUF file describes.

    Raises CheckpointError when the file describes none.
    """
    metadata = file.metadata
    if "tokenizer.ggml.tokens" not in metadata:
        raise CheckpointError(f"{file.path} holds no tokenizer: tokenizer.ggml.tokens is missing")
    if metadata["general.architecture"] not in ("gemma2", "gemma3") or metadata["tokenizer.ggml.model"] != "llama":
        logger.warning("converting the tokenizer of %s; this takes half a minute, once", file.path)
        return AutoTokenizer.from_pretrained(file.path.parent, gguf_file=file.path.name)
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in SPECIAL_TOKENS.items()}
    special = {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    return PreTrainedTokenizerFast(
        tokenizer_object=_gemma(metadata, special), chat_template=metadata.get("tokenizer.chat_template"), **special
    )


def _gemma(metadata: dict[str, Any], special: dict[str, str]) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    # The file spells runs of spaces as they are, the vocabulary with the sign that stands for a space.
    spelled = ["▁" * len(token) if " " in token and not token.strip() else token for token in tokens]
    vocab = {token: index for index, token in enumerate(spelled)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges_of(vocab),
            unk_token=special.get("unk_token"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    kinds = metadata["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    whole = [token for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED and token in vocab]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in whole])
    if metadata.get("tokenizer.ggml.add_bos_token", True) and "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, vocab[bos])]
        )
    return tokenizer


def merges_of(vocab: dict[str, int]) -> list[tuple[str, str]]:
    """The merges that a vocabulary implies: every split of a token into two others, earlier tokens first.

    A GGUF file of Gemma lists none, and the tokens' order is the order in which they were learned.
    """
    merges = []
    for token in sorted(vocab, key=vocab.__getitem__):
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((left, right))
    return merges
