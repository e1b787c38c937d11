"""What the coordinator asks of every kind of group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from hybrid_engine.groups.block import Block
from hybrid_engine.groups.hashing import BlockHash
from hybrid_engine.groups.pool import BlockPool
from hybrid_engine.groups.spec import ENDLESS, LayerSpec

Spec = TypeVar("Spec", bound=LayerSpec)

NEVER = ENDLESS
"""As a position: one that no request reaches."""


def ceil_div(dividend: int, divisor: int) -> int:
    """Divide, rounding up."""
    return -(-dividend // divisor)


class GroupManager(Generic[Spec]):
    """The rule of one group: which tokens it needs to go on at a position, and where it can.

    A subclass says with `num_skipped_tokens` what is no longer needed; all else follows from that.
    """

    def __init__(self, spec: Spec, pool: BlockPool, *, match_unit_tokens: int) -> None:
        self.spec = spec
        self.pool = pool
        self.block_size = spec.block_size
        # A block is found under the hash of the prefix that it ends; hashes exist at every match unit.
        self._units_per_block = spec.block_size // match_unit_tokens
        pool.needs_parents = self.keeps_everything

    @property
    def keeps_everything(self) -> bool:
        """Whether a running request holds all its tokens in this group."""
        return False

    @property
    def is_state(self) -> bool:
        """Whether the group keeps one state that each token overwrites, so that positions must be kept one by one."""
        return False

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return how many tokens from the start are no longer needed once so many are computed."""
        raise NotImplementedError

    def release_position(self, first_block: int) -> int:
        """Return the least number of computed tokens at which the block after first_block's is the first needed."""
        raise NotImplementedError

    def num_peak_blocks(self, num_tokens: int, *, chunk_tokens: int) -> int:
        """Return the most blocks that a request of num_tokens holds while computed chunk_tokens at a time."""
        raise NotImplementedError

    def first_needed_block(self, num_computed_tokens: int) -> int:
        """Return the index of the first block that is needed to go on at num_computed_tokens."""
        return self.num_skipped_tokens(num_computed_tokens) // self.block_size

    def floor_to_block(self, num_tokens: int) -> int:
        """Return the last block end at or below num_tokens."""
        return num_tokens // self.block_size * self.block_size

    def key(self, block_hashes: Sequence[BlockHash], block_index: int) -> BlockHash:
        """Return the key of the block that holds [block_index, block_index + 1) x block_size tokens."""
        return block_hashes[(block_index + 1) * self._units_per_block - 1]

    def needed_keys(self, block_hashes: Sequence[BlockHash], position: int) -> Sequence[BlockHash]:
        """Return the keys of the full blocks that are needed to go on at a position, aligned or not."""
        first, end, stride = self.first_needed_block(position), position // self.block_size, self._units_per_block
        return block_hashes[(first + 1) * stride - 1 : end * stride : stride]

    def num_keyed_blocks(self, block_hashes: Sequence[BlockHash]) -> int:
        """Return how many blocks of this group have a key."""
        return len(block_hashes) // self._units_per_block

    def longest_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> int:
        """Return the largest multiple of block_size, at most max_tokens, at which this group can go on.

        Everything that is needed there must be cached. The answer is exact for any content of the pool. Blocks are
        probed from the lowest needed one: a miss there rules out most positions at once (the idea of Boyer and
        Moore's string search, 1977), so that a prompt of n blocks takes about n / window probes when nothing fits.
        """
        end = min(max_tokens // self.block_size, self.num_keyed_blocks(block_hashes))
        proven = end  # blocks [proven, end) are known to be cached
        while True:
            first = self.first_needed_block(end * self.block_size)
            missing = self._first_missing(block_hashes, first, min(proven, end))
            if missing is None:
                return end * self.block_size
            # [first, missing) was just seen; what lies above is of no use any more.
            end, proven = missing, first

    def has_needed_blocks(self, block_hashes: Sequence[BlockHash], position: int) -> bool:
        """Return whether the full blocks that are needed to go on at a position, aligned or not, are cached."""
        first = self.first_needed_block(position)
        return self._first_missing(block_hashes, first, position // self.block_size) is None

    def collect(self, block_hashes: Sequence[BlockHash], num_tokens: int) -> list[Block] | int:
        """Return the full blocks of a prefix of num_tokens, null blocks below what is needed to go on there.

        Returns the index of the first block that is needed but not cached instead, when there is one.
        """
        first = self.first_needed_block(num_tokens)
        blocks = list(map(self.pool.cached.get, self.needed_keys(block_hashes, num_tokens)))
        if not all(blocks):
            return first + blocks.index(None)
        return [self.pool.null_block] * first + blocks  # type: ignore[operator]

    def num_wanted_blocks(
        self,
        table: Sequence[Block],
        hit: Sequence[Block],
        num_computed_tokens: int,
        num_slots: int,
        num_lookahead_tokens: int = 0,
    ) -> int:
        """Return how many blocks to take so that a table, with a hit put before, has num_slots slots.

        Tokens below num_computed_tokens that this group no longer needs get null blocks instead. num_lookahead_tokens:
        those of the slots that are for drafts.
        """
        start = max(len(table) + len(hit), self.first_needed_block(num_computed_tokens))
        return max(0, ceil_div(num_slots, self.block_size) - start)

    def num_cached_blocks(self, hit: Sequence[Block], partial: Block | None) -> int:
        """Return how many blocks of a hit, and of a block to copy, nobody holds yet."""
        null_block = self.pool.null_block
        num_cached = sum([block.ref_count == 0 for block in hit if block is not null_block])
        return num_cached + (partial is not None and partial.ref_count == 0)

    def pin_hit(self, table: list[Block], hit: Sequence[Block], partial: Block | None) -> None:
        """Hold the blocks of a hit and put them in an empty table; hold the block that is to be copied."""
        assert not (hit and table), f"a hit of {len(hit)} blocks for a request that holds {len(table)} already"
        if partial is not None:
            self.pool.pin((partial,))
        self.pool.pin(hit[self.num_null_blocks(hit) :])
        table.extend(hit)

    def num_null_blocks(self, hit: Sequence[Block]) -> int:
        """Return how many null blocks a hit starts with."""
        return hit.count(self.pool.null_block) if hit and hit[0] is self.pool.null_block else 0

    def append_blocks(self, table: list[Block], num_blocks: int, num_computed_tokens: int) -> None:
        """Fill a table with null blocks up to what is needed at num_computed_tokens, then with new blocks."""
        num_null = self.first_needed_block(num_computed_tokens) - len(table)
        if num_null > 0:
            table.extend([self.pool.null_block] * num_null)
        table.extend(self.pool.take(num_blocks))

    def register_full_blocks(
        self, table: Sequence[Block], block_hashes: Sequence[BlockHash], num_registered: int, num_computed_tokens: int
    ) -> int:
        """Make the full blocks of a table from block num_registered on findable; return how many blocks are full."""
        num_full = num_computed_tokens // self.block_size
        for block_index in range(num_registered, num_full):
            block = table[block_index]
            if block is not self.pool.null_block and block.block_hash is None:
                self.pool.register(block, self.key(block_hashes, block_index))
        return max(num_registered, num_full)

    def release_range(self, table: list[Block], start: int, end: int, kept: Sequence[range]) -> None:
        """Give back the blocks [start, end) of a running request's table, which it has passed.

        They stay findable but go first, except those in kept.
        """
        null_block = self.pool.null_block
        for block_index in range(start, min(end, len(table))):
            block = table[block_index]
            if block is not null_block:
                table[block_index] = null_block
                self.pool.release((block,), evict_first=not any(block_index in blocks for blocks in kept))

    def release_table(self, table: Sequence[Block]) -> None:
        """Give back a whole table, its end first: a parent must outlive its children in the queue."""
        null_block = self.pool.null_block
        self.pool.release([block for block in reversed(table) if block is not null_block])

    def known_end(self, block_hashes: Sequence[BlockHash], start_tokens: int) -> int:
        """Return the end of the blocks from start_tokens on that are cached or remembered as evicted, in tokens."""
        cached, evicted = self.pool.cached, self.pool.evicted
        block_index, end = start_tokens // self.block_size, self.num_keyed_blocks(block_hashes)
        while block_index < end:
            key = self.key(block_hashes, block_index)
            if key not in cached and key not in evicted:
                break
            block_index += 1
        return block_index * self.block_size

    def _first_missing(self, block_hashes: Sequence[BlockHash], first: int, end: int) -> int | None:
        cached = self.pool.cached
        for block_index in range(first, end):
            if self.key(block_hashes, block_index) not in cached:
                return block_index
        return None
