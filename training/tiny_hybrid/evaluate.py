"""Measure an exported model: `python -m training.tiny_hybrid.evaluate DIR`.

The samples are new: other words and numbers than any in training, and English that was held out. An answer counts only
if every token of it is the likeliest one, and then the message ends: that is what greedy decoding gives.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from training.tiny_hybrid import export, tasks
from training.tiny_hybrid import tokenizer as tokenizers
from training.tiny_hybrid.model import TinyJamba
from training.tiny_hybrid.text import english

DISTANCES = (128, 256, 512, 1000, 1500, 2000)
DEPTHS = (0.1, 0.5, 0.9)
NEEDLE_TOKENS = 1500
FACT_EVERY_TOKENS = 50
"""One of so many tokens between a fact and its question begins another fact, which could be confused with it."""
BATCH_TOKENS = 16_384
WINDOW_TOKENS = 1024
"""Of perplexity: the held-out text is cut into pieces of this length."""


@dataclass(frozen=True)
class Sample:
    """A prompt and the only right answer."""

    prompt: str
    answer: str


def recall_sample(rng: random.Random, distance: int, tokenizer: Tokenizer) -> Sample:
    """A question for a fact that was said at least `distance` tokens before its answer is due, and not much earlier."""
    asked, *others = tasks.facts(rng, 2 + distance // FACT_EVERY_TOKENS)
    before = tasks.filler(rng, 60, held_out=True) + others.pop().statement(rng) + asked.statement(rng)
    question = end_of(asked, rng)
    between, num_tokens = "", len(tokenizer.encode(question).ids)
    while num_tokens < distance:
        missing = distance - num_tokens
        if others and missing > 20:
            between += others.pop().statement(rng)
        between += tasks.filler(rng, min(FACT_EVERY_TOKENS - 12, max(2, missing)), held_out=True)
        num_tokens = len(tokenizer.encode(between + question, add_special_tokens=False).ids)
    return Sample(start_of(before + between) + question, asked.answer)


def needle_sample(rng: random.Random, depth: float, num_tokens: int = NEEDLE_TOKENS) -> Sample:
    """A question for the only fact in a long stretch of English."""
    (asked,) = tasks.facts(rng, 1)
    above = tasks.filler(rng, round(depth * num_tokens), held_out=True)
    below = tasks.filler(rng, round((1 - depth) * num_tokens), held_out=True)
    return Sample(start_of(above + asked.statement(rng) + below) + end_of(asked, rng), asked.answer)


def copy_sample(rng: random.Random, num_words: int = 16) -> Sample:
    """Words and numbers to repeat."""
    text = "".join(f" {tasks.value(rng)}" for _ in range(num_words))
    return Sample(f"{tasks.BEGIN}{tasks.ROLES['user']}Repeat:{text}{tasks.END}{tasks.ROLES['assistant']}", text)


def start_of(document: str) -> str:
    """A document as the system's message."""
    return f"{tasks.BEGIN}{tasks.ROLES['system']}{document}{tasks.END}"


def end_of(fact: tasks.Fact, rng: random.Random) -> str:
    """The user's question, up to where the answer is due."""
    return f"{tasks.ROLES['user']}{fact.question(rng)}{tasks.END}{tasks.ROLES['assistant']}"


@torch.inference_mode()
def accuracy(model: TinyJamba, tokenizer: Tokenizer, samples: Sequence[Sample]) -> float:
    """The share of samples that are answered right."""
    device = model.lm_head.weight.device
    prompts = [tokenizer.encode(sample.prompt, add_special_tokens=False).ids for sample in samples]
    wholes = [tokenizer.encode(s.prompt + s.answer + tasks.END, add_special_tokens=False).ids for s in samples]
    rows = max(1, BATCH_TOKENS // max(map(len, wholes)))
    num_right = 0
    for first in range(0, len(samples), rows):
        some = wholes[first : first + rows]
        longest = max(map(len, some))
        # What is filled in behind a sample can't reach back into it.
        tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids in some], device=device)
        likeliest = model(tokens)[0].argmax(-1).tolist()
        for prompt, whole, got in zip(prompts[first:], some, likeliest, strict=False):
            num_right += got[len(prompt) - 1 : len(whole) - 1] == whole[len(prompt) :]
    return num_right / len(samples)


@torch.inference_mode()
def perplexity(model: TinyJamba, tokenizer: Tokenizer) -> float:
    """Of a token of the English that was held out."""
    device = model.lm_head.weight.device
    ids = tokenizer.encode(" ".join(english()[1]), add_special_tokens=False).ids
    pieces = [ids[start : start + WINDOW_TOKENS] for start in range(0, len(ids) - WINDOW_TOKENS + 1, WINDOW_TOKENS)]
    tokens = torch.tensor([[tokenizer.token_to_id(tasks.BEGIN), *piece] for piece in pieces], device=device)
    total = 0.0
    for row in tokens:
        logits = model(row[None, :-1])[0][0]
        total += F.cross_entropy(logits, row[1:], reduction="sum").item()
    return math.exp(total / tokens[:, 1:].numel())


def evaluate(model: TinyJamba, tokenizer: Tokenizer, *, num_samples: int = 200) -> dict[str, float]:
    """All figures."""

    def samples(name: str) -> list[random.Random]:
        return [random.Random(f"evaluate {name} {number}") for number in range(num_samples)]

    figures = {
        f"recall {distance}": accuracy(
            model, tokenizer, [recall_sample(rng, distance, tokenizer) for rng in samples(f"recall {distance}")]
        )
        for distance in DISTANCES
    }
    for depth in DEPTHS:
        made = [needle_sample(rng, depth) for rng in samples(f"needle {depth}")]
        figures[f"needle {depth:.0%}"] = accuracy(model, tokenizer, made)
    figures["copy"] = accuracy(model, tokenizer, [copy_sample(rng) for rng in samples("copy")])
    figures["perplexity"] = perplexity(model, tokenizer)
    return figures


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Measure the tiny hybrid.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--samples", type=int, default=200, help="fresh samples for each figure")
    options = parser.parse_args()
    model = export.load(options.folder).to(options.device)
    print(json.dumps(evaluate(model, tokenizers.load(), num_samples=options.samples), indent=2))


if __name__ == "__main__":
    main()
