"""Sliding window: query i sees keys max(0, i - window + 1) .. i. This is the engine's one definition of it."""

from __future__ import annotations

from hybrid_engine.groups.base import GroupManager, ceil_div
from hybrid_engine.groups.spec import SlidingWindowSpec


class SlidingWindowManager(GroupManager[SlidingWindowSpec]):
    """Needs [p - window + 1, p) to go on at p."""

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.spec.window + 1)

    def release_position(self, first_block: int) -> int:
        return (first_block + 1) * self.block_size + self.spec.window - 1

    def num_peak_blocks(self, num_tokens: int, *, chunk_tokens: int) -> int:
        # window - 1 earlier tokens and a chunk, at the worst offset inside a block.
        span = ceil_div(self.spec.window - 1 + chunk_tokens - 1, self.block_size) + 1
        return min(ceil_div(num_tokens, self.block_size), span)
