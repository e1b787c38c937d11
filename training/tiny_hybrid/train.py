"""Train the tiny hybrid: `python -m training.tiny_hybrid.train --out DIR [--device cuda] [--resume]`.

Everything that is random is a function of the seed and the step. So a run that was killed goes on from its checkpoint
and ends with the same weights, on the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from training.tiny_hybrid import export
from training.tiny_hybrid import tokenizer as tokenizers
from training.tiny_hybrid.batches import batch
from training.tiny_hybrid.evaluate import evaluate
from training.tiny_hybrid.model import TinyJamba
from training.tiny_hybrid.muon import Muon
from training.tiny_hybrid.recorded import Recorded
from training.tiny_hybrid.settings import Recipe

CHECKPOINT = "checkpoint.pt"
SAVE_EVERY_SECONDS = 120.0
MAX_NORM = 1.0
"""Longer gradients are cut to this length."""


class Training:
    """A model, its optimizers, and how far they are."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer, *, device: str = "cpu") -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.device, self.step = recipe, device, 0
        self._tokenizer = tokenizer
        self.model = TinyJamba(recipe.model).to(device)
        self._optimizers = make_optimizers(self.model, recipe)
        # The scan's thousands of small operations wait for the CPU unless a GPU gets them all at once.
        self._gradients = Recorded(self._compute_gradients) if device == "cuda" else self._compute_gradients

    def run_step(self) -> dict[str, Tensor]:
        """Learn from one batch; returns what the losses were."""
        recipe, stage = self.recipe, self.recipe.stage_at(self.step)
        tokens, weights = batch(self._tokenizer, seed=recipe.seed, step=self.step, stage=stage)
        figures = self._gradients(tokens.to(self.device), weights.to(self.device))
        figures["norm"] = nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        rates = (recipe.matrix_rate, recipe.other_rate)
        for optimizer, peak in zip(self._optimizers, rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * recipe.rate_at(self.step)
            optimizer.step()
        self.step += 1
        return figures

    def _compute_gradients(self, tokens: Tensor, weights: Tensor) -> dict[str, Tensor]:
        self.model.zero_grad(set_to_none=False)
        # The matrix products in bfloat16, which recent processors are several times faster at; all else in float32.
        with torch.autocast(self.device, torch.bfloat16):
            loss, answers = losses(self.model, tokens, weights, balance=self.recipe.balance)
        loss.backward()
        return {"loss": loss.detach(), "answers": answers}

    def save(self, folder: Path) -> None:
        """Write a checkpoint; a run that is killed meanwhile leaves the one before."""
        kept = {
            "recipe": asdict(self.recipe),
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        scratch = folder / f"{CHECKPOINT}.new"
        torch.save(kept, scratch)
        os.replace(scratch, folder / CHECKPOINT)

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint. Raises ValueError when it is one of another recipe."""
        kept = torch.load(folder / CHECKPOINT, map_location=self.device, weights_only=True)
        if json.dumps(kept["recipe"]) != json.dumps(asdict(self.recipe)):
            raise ValueError(f"{folder / CHECKPOINT} is of another recipe: give another --out, or the same settings")
        self.step = kept["step"]
        self.model.load_state_dict(kept["model"])
        for optimizer, state in zip(self._optimizers, kept["optimizers"], strict=True):
            optimizer.load_state_dict(state)


def losses(model: TinyJamba, tokens: Tensor, weights: Tensor, *, balance: float) -> tuple[Tensor, Tensor]:
    """What is minimised, and the mean loss on answers alone."""
    logits, uneven = model(tokens[:, :-1])
    each = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
    weight = weights.flatten()
    is_answer = (weight == 1.0).float()
    answers = ((each * is_answer).sum() / is_answer.sum().clamp(min=1)).detach()
    return (each * weight).sum() / weight.sum() + balance * uneven, answers


def make_optimizers(model: TinyJamba, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for all else."""
    layers = dict(model.model.layers.named_parameters())
    matrices = [p for name, p in layers.items() if p.ndim == 2 and not name.endswith(("A_log", "router.weight"))]
    ids = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in ids]
    return [
        Muon(matrices, lr=recipe.matrix_rate, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(others, lr=recipe.other_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def train(training: Training, folder: Path, *, log_every: int = 25) -> None:
    """Run to the end of the recipe, with a log line now and then and a checkpoint every two minutes."""
    start = saved = time.monotonic()
    num_tokens = 0
    while training.step < training.recipe.num_steps:
        num_tokens += training.recipe.stage_at(training.step).step_tokens
        figures = training.run_step()
        if training.step % log_every == 0 or training.step == training.recipe.num_steps:
            seconds = time.monotonic() - start
            speed = num_tokens / seconds
            facts = {name: round(value.item(), 4) for name, value in figures.items()}
            _log(folder, {"step": training.step, **facts, "seconds": round(seconds, 1), "tokens_per_s": round(speed)})
        if time.monotonic() - saved > SAVE_EVERY_SECONDS:
            training.save(folder)
            saved = time.monotonic()
    training.save(folder)


def _log(folder: Path, facts: dict[str, Any]) -> None:
    line = json.dumps(facts)
    print(line, flush=True)
    with (folder / "log.jsonl").open("a") as file:
        print(line, file=file)


def main(arguments: Iterable[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Train the tiny hybrid.")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints, the log and the result")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    options = parser.parse_args(None if arguments is None else list(arguments))
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    tokenizer = tokenizers.load()
    training = Training(Recipe(), tokenizer, device=options.device)
    if options.resume:
        training.load(options.out)
    elif (options.out / CHECKPOINT).exists():
        parser.error(f"{options.out} holds a checkpoint: add --resume to go on from it, or give another --out")
    train(training, options.out)
    export.export(training.model, tokenizer, options.out / "model")
    figures = evaluate(export.load(options.out / "model").to(options.device), tokenizer)
    _log(options.out, figures)


if __name__ == "__main__":
    main()
