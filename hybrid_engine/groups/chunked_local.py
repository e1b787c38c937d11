"""Chunked local attention: query i sees keys floor(i / chunk) * chunk .. i."""

from __future__ import annotations

from hybrid_engine.groups.base import GroupManager, ceil_div
from hybrid_engine.groups.spec import ChunkedLocalSpec


class ChunkedLocalManager(GroupManager[ChunkedLocalSpec]):
    """Needs [floor(p / chunk) * chunk, p) to go on at p; nothing where a chunk starts."""

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self.spec.chunk * self.spec.chunk

    def release_position(self, first_block: int) -> int:
        return ceil_div((first_block + 1) * self.block_size, self.spec.chunk) * self.spec.chunk

    def num_peak_blocks(self, num_tokens: int, *, chunk_tokens: int) -> int:
        span = ceil_div(self.spec.chunk - 1 + chunk_tokens - 1, self.block_size) + 1
        return min(ceil_div(num_tokens, self.block_size), span)
