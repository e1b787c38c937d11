"""Recurrent layers: a state of fixed size, valid after exactly as many tokens as it has consumed.

A state is treated as one block without end. A request writes its working state from its first token to its last, so
its table has one entry, and every position lies inside that block: a position can be resumed only where a checkpoint
keeps a state of exactly that many tokens, and whoever resumes there gets a copy.

A request that has drafted has one more entry for each draft: a step leaves the state after each of its tokens there,
so that those of rejected drafts are undone by taking the right one. Between two steps only entry 0 means anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_engine.groups.base import NEVER, GroupManager
from hybrid_engine.groups.block import Block
from hybrid_engine.groups.spec import MambaSpec


class MambaStateManager(GroupManager[MambaSpec]):
    """Needs the state after exactly p tokens to go on at p; nothing at 0."""

    @property
    def is_state(self) -> bool:
        return True

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return 0

    def release_position(self, first_block: int) -> int:
        return NEVER

    def num_peak_blocks(self, num_tokens: int, *, chunk_tokens: int) -> int:
        return 1

    def num_wanted_blocks(
        self,
        table: Sequence[Block],
        hit: Sequence[Block],
        num_computed_tokens: int,
        num_slots: int,
        num_lookahead_tokens: int = 0,
    ) -> int:
        return max(0, 1 + num_lookahead_tokens - len(table))
