"""The tokenizer: byte-level BPE over English and our tasks, single digits, and a token that ends every message."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from training.tiny_hybrid.settings import ModelSettings
from training.tiny_hybrid.tasks import BEGIN, END, ROLES, copy_task, pairs_task, recall_task
from training.tiny_hybrid.text import english

PATH = Path(__file__).parent / "data" / "tokenizer.json"
PAD = "<|pad|>"
SPECIAL = (BEGIN, END, PAD, *ROLES.values())
"""In the order of their ids: jamba_config names the first three."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first %}<|begin|>{% endif %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('the role is ' ~ message.role ~ ', must be system, user or assistant') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NUM_TASKS = 3000
"""Synthetic samples that merges are learned from, beside the text."""


def train_tokenizer() -> Tokenizer:
    """Learn the merges; the same text gives the same ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ModelSettings().vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_samples(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, SPECIAL.index(BEGIN))]
    )
    return tokenizer


def _samples() -> Iterator[str]:
    yield from english()[0]
    for seed in range(NUM_TASKS):
        rng = random.Random(f"tokenizer {seed}")
        make = rng.choice((recall_task, copy_task, pairs_task))
        yield "".join(piece.text for piece in make(rng, 256))


def load() -> Tokenizer:
    """The tokenizer that lies beside the text."""
    return Tokenizer.from_file(str(PATH))


def with_chat(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers has it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    train_tokenizer().save(str(PATH))
