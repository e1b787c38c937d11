"""Full attention: every token is needed for ever."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from hybrid_engine.groups.base import NEVER, GroupManager, ceil_div
from hybrid_engine.groups.hashing import BlockHash
from hybrid_engine.groups.spec import FullAttentionSpec


class FullAttentionManager(GroupManager[FullAttentionSpec]):
    """A parent block outlives its children, so what is cached of a prompt is a prefix of it."""

    @property
    def keeps_everything(self) -> bool:
        return True

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return 0

    def release_position(self, first_block: int) -> int:
        return NEVER

    def num_peak_blocks(self, num_tokens: int, *, chunk_tokens: int) -> int:
        return ceil_div(num_tokens, self.block_size)

    def longest_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> int:
        """Gallop, then bisect: about 2 log2(n) probes for n cached blocks.

        The block after the answer is missing, so it is an upper bound even if a block below were lost; `collect`
        would name that one.
        """
        cached, stride = self.pool.cached, self._units_per_block
        end = min(max_tokens // self.block_size, self.num_keyed_blocks(block_hashes))
        high = 1
        while high <= end and block_hashes[high * stride - 1] in cached:
            high *= 2

        # Block high - 1 is missing or beyond the end; block high // 2 - 1 is cached, or there is none.
        def is_missing(block_index: int) -> bool:
            return block_hashes[(block_index + 1) * stride - 1] not in cached

        num_cached = bisect_left(range(end), True, lo=high // 2, hi=min(high - 1, end), key=is_missing)
        return num_cached * self.block_size
