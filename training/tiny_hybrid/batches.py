"""Batches: a function of the seed and the step, so that a resumed run sees what the first would have seen."""

from __future__ import annotations

import random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.tiny_hybrid.settings import Stage
from training.tiny_hybrid.tasks import Piece, copy_task, english_task, pairs_task, recall_task

TASKS = {"pairs": pairs_task, "copy": copy_task, "recall": recall_task, "english": english_task}


def batch(tokenizer: Tokenizer, *, seed: int, step: int, stage: Stage) -> tuple[Tensor, Tensor]:
    """Return tokens int64 [rows, length + 1] and the weight of predicting each but the first."""
    rows = [_row(tokenizer, random.Random(f"{seed} {step} {row}"), stage) for row in range(stage.num_rows)]
    tokens, weights = (torch.tensor(column) for column in zip(*rows, strict=True))
    return tokens, weights[:, 1:]


def _row(tokenizer: Tokenizer, rng: random.Random, stage: Stage) -> tuple[list[int], list[float]]:
    """One sample, and more behind it where it is too short; what is too long is cut off."""
    tokens: list[int] = []
    weights: list[float] = []
    length = stage.length
    while len(tokens) <= length:
        (name,) = rng.choices(list(stage.shares), list(stage.shares.values()))
        more, their_weights = encode(tokenizer, TASKS[name](rng, max(64, length - len(tokens))))
        tokens += more
        weights += their_weights
    return tokens[: length + 1], weights[: length + 1]


def encode(tokenizer: Tokenizer, pieces: list[Piece]) -> tuple[list[int], list[float]]:
    """The tokens of a sample's whole text, each with the weight of the piece in which it begins."""
    encoded = tokenizer.encode("".join(piece.text for piece in pieces), add_special_tokens=False)
    weights, ends, end = [], [], 0
    for piece in pieces:
        end += len(piece.text)
        ends.append(end)
    index = 0
    for start, _ in encoded.offsets:
        while ends[index] <= start:
            index += 1
        weights.append(pieces[index].weight)
    return encoded.ids, weights
