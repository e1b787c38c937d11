"""How well a model predicts prose, by how far into it it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybrid_engine.evals.samples import Builder, Group, LengthError, Sample
from hybrid_engine.evals.tasks.base import GroupId, Task

STRIDE = 4096
"""Tokens between the beginnings of two windows of the text."""


class Perplexity(Task):
    """The perplexity of the second half of each length; the first half comes from the cache where it was computed."""

    name = "perplexity"
    about = "prose, the perplexity of the tokens in the second half of each length"
    max_tokens = 1
    metric_name = "perplexity"

    def batches(self, lengths: Sequence[int], num_samples: int) -> Iterator[list[GroupId]]:
        """Yield all lengths of one window together: each is the beginning of the next."""
        for number in range(num_samples):
            yield [(length, number) for length in lengths]

    def make_group(self, builder: Builder, length: int, number: int) -> Group:
        """Return one window; its tokens but the first are the text's."""
        tokenizer, prompts = builder.prompts.tokenizer, builder.prompts
        if length < 4:
            raise LengthError(f"{self.name} at length {length}: give a length of at least 4")
        known = builder.essay_token_ids
        first = [tokenizer.bos_token_id] if prompts.begins_with_bos else []
        # One token is sampled behind the prompt, whether anybody wants it or not.
        start, count = number * STRIDE, length - len(first) - 1
        if start + count > len(known):
            raise LengthError(
                f"{self.name} at length {length:,}: the text has {len(known):,} tokens, window {number} ends at "
                f"{start + count:,}: give a longer essay, fewer samples or shorter lengths"
            )
        ids = (*first, *known[start : start + count])
        sample = Sample(
            task=self.name,
            length=length,
            index=number,
            document="",
            question="",
            max_tokens=1,
            token_ids=ids,
            scored_from=length // 2,
        )
        return [sample]
