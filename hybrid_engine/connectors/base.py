"""What the scheduler asks of whoever keeps cache entries elsewhere. No torch here.

A load's life: `find` says how far a prompt is known elsewhere. The scheduler takes blocks for it and calls
`start_load`, which returns at once; other requests run meanwhile, and nobody can find the blocks. When all bytes are
there, or the load has failed, `take_finished` says so: the blocks then become findable, or are given back and the
tokens computed. Blocks of a load stay held until it has ended, also when its request is aborted before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hybrid_engine.request import Request
from hybrid_engine.step_plan import BlockId, TransferPlan


@dataclass(frozen=True, slots=True)
class KVLoad:
    """Cache entries of tokens [num_local_tokens, end_tokens) of one request, to be written into its blocks.

    In a group of recurrent states that is one state, the one after exactly end_tokens tokens. A window group has null
    blocks for what lies below the window at end_tokens: nothing is to be written there.
    """

    load_id: int
    """Given out once; a request's id may come again."""
    request: Request
    """Whose tokens and block hashes say what is wanted; not to be changed."""
    num_local_tokens: int
    """Tokens that the groups hold already: whole blocks of every token group."""
    num_external_tokens: int
    block_ids: tuple[tuple[BlockId, ...], ...]
    """The request's whole block table, by group: entry i of a token group holds [i, i + 1) x block_size tokens; the
    one entry of a state group is the working state."""

    @property
    def end_tokens(self) -> int:
        """Tokens computed once the load has succeeded."""
        return self.num_local_tokens + self.num_external_tokens


@dataclass(frozen=True, slots=True)
class KVLoadResult:
    """How a load ended. Its blocks are not touched any more."""

    load_id: int
    is_loaded: bool
    """Whether every byte was written; what is False is computed instead."""


class KVConnector(Protocol):
    """Brings cache entries from elsewhere. Called from the scheduler's thread; none of its methods may block long."""

    def find(self, request: Request, num_local_tokens: int) -> int:
        """Return how many tokens it can bring beyond the first num_local_tokens, which blocks of all groups end at.

        Together at most `request.max_hit_tokens`: as a rule all known tokens but the last. 0: none. For models with
        recurrent states the end must be a position whose states it has. Asked again whenever the request is looked at
        anew; must change nothing that another answer depends on (its own counters it may).
        """

    def start_load(self, load: KVLoad) -> None:
        """Begin to write what `find` has promised. It may fail later, by its result; it must not raise."""

    def take_finished(self) -> Sequence[KVLoadResult]:
        """Return the loads that have ended since it was last asked, each once."""

    def take_transfers(self) -> TransferPlan | None:
        """Return what the runner is to move at the start of the next step; asked at the end of every `schedule`.

        That is how blocks are copied out before they are overwritten, and how a load begins only after that.
        """
