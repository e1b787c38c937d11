"""Filling a model from a checkpoint: each weight written once and whole, each tensor used or known to be unused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from hybrid_engine.errors import CheckpointError
from hybrid_engine.weights.checkpoint import Checkpoint, listed
from hybrid_engine.weights.parts import Part, Weight

PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
"""Where a checkpoint keeps the decoder: alone, inside a multimodal model (new, old), saved without a head."""
EMBEDDINGS, HEAD = ("model.embed_tokens.weight", "backbone.embeddings.weight"), "lm_head.weight"
"""Names of the embedding (a transformer's, a Mamba's) and of the head."""
OLD_HEAD = "language_model.lm_head.weight"
OLD_NAMES = {"backbone.embedding.weight": "backbone.embeddings.weight"}
"""Of the first Mamba checkpoints."""

ALIASES = (
    (r"(\.layers\.\d+)\.attention_layer_norm\.", r"\1.input_layernorm."),  # Olmo hybrids
    (r"(\.layers\.\d+)\.feedforward_layer_norm\.", r"\1.post_attention_layernorm."),
    (r"\.block_sparse_moe\.(experts|shared_experts|gate|gate_proj|up_proj|down_proj)\.", r".mlp.\1."),
)
"""Parts of names that checkpoints have beside the ones that the models ask for: patterns, and what stands for them."""

UNUSED = (
    r".*rotary_emb\.inv_freq",  # derived from the config
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|embed_vision)\..*",  # images aren't read here
    r"(model\.)?(audio_tower|embed_audio)\..*",  # nor is sound
    r"(model\.)?mtp\..*",  # nor are tokens guessed by heads of the model's own
    r".*\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)",  # derived from the config (MiniMax)
)
"""Tensors that a text model leaves alone."""

TakeWeight = Callable[[Weight, Tensor], None]
"""Gives a filled weight to the module that declared it."""


def load_weights(
    weights: Iterable[tuple[Weight, TakeWeight]],
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    unused: Iterable[str] = (),
) -> None:
    """Fill every weight and hand it over, one at a time, so that no more than one lies in memory twice.

    unused: patterns of tensors that this model leaves alone, beside those that all text models do.
    Raises CheckpointError when a tensor is missing, has another shape, is of integers, isn't finite or is left over.
    """
    weights = list(weights)
    names = stored_names(checkpoint)
    counts = Counter(part.name for weight, _ in weights for part in weight.parts)
    assert max(counts.values()) == 1, f"declared twice: {[name for name, count in counts.items() if count > 1]}"
    check_complete(checkpoint, names, counts.keys(), unused=tuple(unused))
    for weight, take in weights:
        kept_dtype = torch.float32 if weight.is_float32 else dtype
        take(weight, filled(weight, checkpoint, names, dtype=kept_dtype).to(device))


def filled(weight: Weight, checkpoint: Checkpoint, names: dict[str, str], *, dtype: torch.dtype) -> Tensor:
    """A weight's tensor, with every element written. It starts as NaN, so that an unwritten element shows."""
    tensor = torch.full(weight.shape, torch.nan, dtype=dtype)
    start = 0
    for part in weight.parts:
        stop = start + part.shape[0]
        tensor[start:stop] = read_part(part, checkpoint, names[part.name], dtype=dtype)
        start = stop
    if not tensor.isfinite().all():
        parts = ", ".join(part.name for part in weight.parts)
        raise CheckpointError(f"{checkpoint.path}: {'NaN' if tensor.isnan().any() else 'infinity'} in {parts}")
    return tensor


def read_part(part: Part, checkpoint: Checkpoint, name: str, *, dtype: torch.dtype) -> Tensor:
    """One tensor of the checkpoint.

    Raises CheckpointError when its shape isn't what the config implies, or when it holds integers: those are quantised
    weights, which mean nothing without their scales.
    """
    shape = tuple(checkpoint.shape(name))
    implied = part.stored_shape or part.shape
    if shape != implied:
        raise CheckpointError(f"{checkpoint.path}: {name} has shape {list(shape)}, its config implies {list(implied)}")
    tensor = checkpoint.tensor(name, dtype=dtype)
    if not tensor.is_floating_point():
        stored = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{checkpoint.path}: {name} is stored as {stored}, must be a float: take a checkpoint that isn't quantised"
        )
    return tensor if part.change is None else part.change(tensor)


def check_complete(
    checkpoint: Checkpoint, names: dict[str, str], wanted: Iterable[str], *, unused: tuple[str, ...] = ()
) -> None:
    """Raise CheckpointError unless the checkpoint has all that is wanted and nothing that isn't accounted for."""
    wanted = set(wanted)
    if missing := sorted(wanted - names.keys()):
        hint = "; its config says that the head isn't tied to the embedding" if missing == [HEAD] else ""
        raise CheckpointError(f"{checkpoint.path} lacks {listed(missing)}{hint}")
    spare = names.keys() - wanted
    if HEAD in spare:
        check_tied(checkpoint, names)
        spare = spare - {HEAD}
    if foreign := sorted(name for name in spare if not is_unused(name, UNUSED + unused)):
        raise CheckpointError(f"{checkpoint.path} has tensors that nothing reads: {listed(foreign)}")


def check_tied(checkpoint: Checkpoint, names: dict[str, str]) -> None:
    """Raise CheckpointError when a head that the config ties to the embedding differs from it."""
    head, embedding = names[HEAD], next(names[name] for name in EMBEDDINGS if name in names)
    same_shape = checkpoint.shape(head) == checkpoint.shape(embedding)
    if not same_shape or not torch.equal(checkpoint.tensor(head), checkpoint.tensor(embedding)):
        raise CheckpointError(
            f"{checkpoint.path}: {head} differs from the embedding, though the config ties them: "
            "set tie_word_embeddings to false"
        )


def stored_names(checkpoint: Checkpoint) -> dict[str, str]:
    """What the checkpoint calls each tensor, by the name that it has in a decoder that stands alone."""
    stored = list(checkpoint.names())
    prefix = next((prefix for prefix in PREFIXES if f"{prefix}embed_tokens.weight" in stored), "model.")
    names = {}
    for name in stored:
        if name == OLD_HEAD:
            names[HEAD] = name
        elif name.startswith(prefix) and name != HEAD and not is_unused(name):
            names["model." + name.removeprefix(prefix)] = name
        else:
            names[OLD_NAMES.get(name, name)] = name
    plain: dict[str, str] = {}
    for name, stored_name in names.items():
        other = plain.setdefault(plain_name(name), stored_name)
        if other != stored_name:
            raise CheckpointError(f"{checkpoint.path} has {other} and {stored_name}, which are names of one weight")
    return plain


def plain_name(name: str) -> str:
    """A name without aliases in it."""
    for pattern, replacement in ALIASES:
        name = re.sub(pattern, replacement, name)
    return name


def is_unused(name: str, patterns: Iterable[str] = UNUSED) -> bool:
    """Whether a text model leaves this tensor alone."""
    return any(re.fullmatch(pattern, name) for pattern in patterns)
