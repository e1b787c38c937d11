"""Memory of a fake device: what lies in the slots of each block, where groups may share the bytes."""

from collections.abc import Sequence

from hybrid_engine.groups.base import GroupManager


class DeviceSlots:
    """The slots of one group's blocks, by block id, in memory that may be shared: who comes last has it."""

    def __init__(self, manager: GroupManager) -> None:
        self._arena = manager.pool.arena
        self._num_slots = _slots_of(manager)
        self._num_units = self._arena.region.block_units[self._arena.pools.index(manager.pool)]
        self._first_unit = self._arena.region.first_unit
        self._content: dict[int, list] = {}
        self._owner: dict[int, tuple[DeviceSlots, int]] = {}

    def share_with(self, others: "Sequence[DeviceSlots]") -> None:
        first = next(other for other in others if other._arena is self._arena)
        self._owner = first._owner

    def __getitem__(self, block_id: int) -> list:
        assert self._first_unit <= block_id, f"block {block_id}, the first is {self._first_unit}"
        for unit in range(block_id, block_id + self._num_units):
            owner = self._owner.get(unit)
            if owner != (self, block_id):
                if owner is not None:
                    owner[0]._content.pop(owner[1], None)
                self._owner[unit] = self, block_id
        return self._content.setdefault(block_id, [None] * self._num_slots)


def _slots_of(manager: GroupManager) -> int:
    return 1 if manager.is_state else manager.block_size
