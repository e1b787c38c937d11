"""How likely continuations of a context are: what `LLM.score` sends and returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from hybrid_engine.errors import RequestError
from hybrid_engine.inputs import as_token_ids
from hybrid_engine.outputs import RequestOutput
from hybrid_engine.sampling_params import SamplingParams

Continuation = str | Sequence[int]
"""Text, or token ids that are taken as they are."""


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """How likely a model finds a continuation."""

    token_ids: list[int]
    logprobs: list[float]
    """The natural logarithm of each token's probability behind all before it."""
    is_greedy: bool
    """Whether each token is the likeliest one at its place."""
    num_prompt_tokens: int
    """Of the context and the continuation."""
    num_computed_tokens: int
    """Those of them that were not found in the prefix cache."""

    @property
    def logprob(self) -> float:
        """The sum over all tokens."""
        return sum(self.logprobs)


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """One continuation behind its context, ready to run."""

    prompt: dict[str, Any]
    start: int
    """The first token of the continuation."""

    @property
    def sampling(self) -> SamplingParams:
        """What to ask of the engine."""
        return SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, prompt_logprob_start=self.start)

    def score(self, output: RequestOutput) -> ContinuationScore:
        """Read the score from what the engine answered."""
        assert output.prompt_logprobs is not None, f"request {output.request_id} has no log-probabilities"
        assert output.cache is not None, f"request {output.request_id} ended without having run"
        token_ids = output.prompt_token_ids[self.start :]
        positions = [position or {} for position in output.prompt_logprobs[self.start :]]
        found = [position[token_id] for position, token_id in zip(positions, token_ids, strict=True)]
        return ContinuationScore(
            token_ids=token_ids,
            logprobs=[each.logprob for each in found],
            is_greedy=all(each.rank == 1 for each in found),
            num_prompt_tokens=len(output.prompt_token_ids),
            num_computed_tokens=output.cache.num_computed,
        )


def scoring_request(
    tokenizer: PreTrainedTokenizerBase, context: dict[str, Any], continuation: Continuation
) -> ScoringRequest:
    """Put a continuation behind its context. context: as `LLM.as_tokens` returns it.

    Two texts are tokenised as one; what is scored are the tokens behind those that this has in common with the context
    alone. Raises RequestError when nothing is left to score, or nothing is before it.
    """
    context_ids, text = context["prompt_token_ids"], context["prompt"]
    if not isinstance(continuation, str):
        whole = [*context_ids, *as_token_ids(continuation)]
        start = len(context_ids)
    elif text is None:
        whole = [*context_ids, *tokenizer(continuation, add_special_tokens=False)["input_ids"]]
        start = len(context_ids)
    else:
        # A rendered conversation brings its own begin-of-text token.
        adds_special_tokens = tokenizer(text)["input_ids"] == list(context_ids)
        whole = tokenizer(text + continuation, add_special_tokens=adds_special_tokens)["input_ids"]
        start = num_common_tokens(context_ids, whole)
    if start == 0 or start == len(whole):
        missing = "the context" if start == 0 else "the continuation"
        raise RequestError(f"{missing} has no tokens: there must be at least one to score, and one before it")
    # All but the context's last token are the same for all its continuations: recurrent layers leave a state there.
    boundaries = [*(position for position in context["message_boundaries"] if position < start - 1), start - 1]
    prompt = {**context, "prompt": None, "prompt_token_ids": whole, "message_boundaries": boundaries}
    return ScoringRequest(prompt, start)


def num_common_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two prompts begin with in common."""
    length = min(len(one), len(other))
    differs = np.asarray(one[:length]) != np.asarray(other[:length])
    return int(differs.argmax()) if differs.any() else length
