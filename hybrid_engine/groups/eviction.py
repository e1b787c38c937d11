"""What decides which checkpoint goes next: the interface of the policies in `hybrid_engine/eviction/`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybrid_engine.groups.checkpoint_facts import CheckpointFacts
    from hybrid_engine.groups.checkpoints import Checkpoint


class EvictionPolicy:
    """Is told what happens to checkpoints, and says which one goes when memory is short.

    The index calls it after the fact, with every checkpoint that is recorded: `record` first, `forget` last. It never
    changes a checkpoint. The order in which pinned ones would go doesn't matter: they don't.
    """

    facts: CheckpointFacts
    """What else can be known of checkpoints; set by `bind` before anything is recorded."""

    def bind(self, facts: CheckpointFacts) -> None:
        """Serve one index, whose facts these are."""
        self.facts = facts

    def record(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is there that wasn't before."""

    def use(self, checkpoint: Checkpoint) -> None:
        """A request goes on from a checkpoint, or laid it once more; those on the way to it were not used."""

    def thin(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is spare from now on, `is_spare` says so: it goes before all that are not."""

    def pin(self, checkpoint: Checkpoint) -> None:
        """A checkpoint, not pinned before, must stay."""

    def unpin(self, checkpoint: Checkpoint) -> None:
        """Nobody pins a checkpoint any more."""

    def forget(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is gone, given up or not."""

    def next_victim(self) -> Checkpoint | None:
        """Return the checkpoint that goes next, which is recorded and not pinned; None when there is none."""
        raise NotImplementedError
