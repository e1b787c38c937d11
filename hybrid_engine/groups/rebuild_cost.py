"""How long it would take to compute tokens again."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_engine.groups.spec import AttentionSpec, FullAttentionSpec, Group

QUERY_HEADS_OF_KEY = 4
"""Query heads that share a key head: what a group's spec doesn't tell, taken to be usual."""
FLOPS_OF_WIDTH = 24
"""Times width squared: what a layer's projections and its MLP compute for a token (Kaplan et al. 2020, table 1)."""
FLOPS_PER_SECOND = 1e12
"""FLOPs a second, before anything was measured. Only ratios matter: all is divided by the same."""
MIN_STEP_TOKENS = 64
"""Smaller steps are left out: what they take is not the tokens' share."""
MEMORY_STEPS = 200
"""Steps after which an older one counts 1/e."""


class RebuildCost:
    """Seconds of a stretch of tokens: so many for each, and so many for each token before it.

    Until steps are reported, the ratio of the two follows from the groups: a layer's matrices take FLOPS_OF_WIDTH x
    width^2 FLOPs a token, full attention 4 x width for each token before it. Then a weighted least-squares fit of
    steps' seconds to both counts replaces it.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        attention = [group for group in groups if isinstance(group.spec, AttentionSpec)]
        widths = [QUERY_HEADS_OF_KEY * group.spec.num_kv_heads * group.spec.head_size for group in attention]  # type: ignore[union-attr]
        width = max(widths, default=1024)
        num_layers = sum(len(group.layer_indices) for group in groups)
        num_full = sum(len(group.layer_indices) for group in groups if isinstance(group.spec, FullAttentionSpec))
        self.token_seconds = num_layers * FLOPS_OF_WIDTH * width**2 / FLOPS_PER_SECOND
        self.pair_seconds = num_full * 4 * width / FLOPS_PER_SECOND
        """For each pair of a token and one before it."""
        self._sums = [0.0] * 5

    def seconds(self, start: int, end: int) -> float:
        """Return the seconds of tokens [start, end) behind start others."""
        return self.token_seconds * (end - start) + self.pair_seconds * _num_pairs(start, end)

    def note_step(self, starts: Sequence[int], counts: Sequence[int], seconds: float) -> None:
        """Learn from a step that computed counts[i] tokens behind starts[i] others, for each request i."""
        num_tokens = sum(counts)
        if num_tokens < MIN_STEP_TOKENS or seconds <= 0:
            return
        num_pairs = sum(_num_pairs(start, start + count) for start, count in zip(starts, counts, strict=True))
        news = (
            *(num_tokens * num_tokens, num_tokens * num_pairs, num_pairs * num_pairs),
            *(num_tokens * seconds, num_pairs * seconds),
        )
        self._sums = [old * (1 - 1 / MEMORY_STEPS) + new for old, new in zip(self._sums, news, strict=True)]
        self._fit()

    def _fit(self) -> None:
        tokens2, both, pairs2, token_seconds, pair_seconds = self._sums
        determinant = tokens2 * pairs2 - both * both
        if determinant > 1e-9 * tokens2 * pairs2:
            linear = (token_seconds * pairs2 - pair_seconds * both) / determinant
            quadratic = (pair_seconds * tokens2 - token_seconds * both) / determinant
            if linear > 0 and quadratic >= 0:
                self.token_seconds, self.pair_seconds = linear, quadratic
                return
        # All steps alike, or noise: what can be told is how long a token takes.
        self.token_seconds, self.pair_seconds = token_seconds / tokens2, 0.0


def _num_pairs(start: int, end: int) -> float:
    return (end * end - start * start) / 2
