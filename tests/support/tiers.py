"""A scheduler with a tiered connector and a device that moves what plans say, late and failing as a generator says."""

import random
from collections.abc import Sequence

from bookkeeping import Bench, FakeDevice

from hybrid_engine.connectors.host import HostTier
from hybrid_engine.connectors.store import TieredStore
from hybrid_engine.connectors.tiered import TieredConnector
from hybrid_engine.coordinator import Coordinator
from hybrid_engine.groups.spec import LayerSpec
from hybrid_engine.scheduler import Scheduler
from hybrid_engine.step_plan import StepPlan
from hybrid_engine.transfer_plan import BlockPart, Load


class FlakyStore(TieredStore):
    """Host memory in which some things turn out to be gone when they are wanted. A payload is a list of slots."""

    def __init__(self, budget_slots: int, *, loses: float = 0.0, rng: random.Random) -> None:
        super().__init__(host=HostTier(budget_slots), disk=None)
        self.loses = loses
        self.rng = rng

    def get(self, key):
        if self.rng.random() < self.loses:
            self.discard(key)
            return None
        return super().get(key)


class TierDevice(FakeDevice):
    """Saves before a step writes, copies, and ends loads some steps later; until then their blocks hold garbage."""

    def __init__(self, coordinator: Coordinator, store: TieredStore, *, delay_steps: int, rng: random.Random) -> None:
        super().__init__(coordinator)
        self.store = store
        self.delay_steps = delay_steps
        self.rng = rng
        self.loading: list[tuple[int, Load]] = []
        self.num_saved = 0
        self.num_loaded = 0

    def _move_bytes(self, plan: StepPlan) -> None:
        moved = plan.transfers
        for save in moved.saves if moved is not None else ():
            self.store.put(save.key, [slot for part in save.parts for slot in self.read(part)])
            self.num_saved += 1
        super()._move_bytes(plan)
        if moved is not None:
            for copy in moved.copies:
                slots = self.slots[copy.group_id]
                slots[copy.target_id][: copy.num_slots] = slots[copy.source_id][: copy.num_slots]
            for load in moved.loads:
                self.write(load, None)
                self.loading.append((self.rng.randint(0, self.delay_steps), load))

    def advance(self) -> None:
        """Let one step's time pass."""
        due = [load for delay, load in self.loading if delay == 0]
        self.loading = [(delay - 1, load) for delay, load in self.loading if delay > 0]
        for load in due:
            payloads = [self.store.get(transfer.key) for transfer in load.transfers]
            is_complete = None not in payloads
            self.write(load, payloads if is_complete else None)
            self.num_loaded += is_complete
            self.store.end_load(load.load_id, is_complete=is_complete, seconds=0.01)

    def read(self, part: BlockPart) -> list:
        return self.slots[part.group_id][part.block_id][: part.num_slots]

    def write(self, load: Load, payloads: Sequence[list] | None) -> None:
        for index, transfer in enumerate(load.transfers):
            values = (
                list(payloads[index]) if payloads else [b"loading"] * sum(part.num_slots for part in transfer.parts)
            )
            for part in transfer.parts:
                self.slots[part.group_id][part.block_id][: part.num_slots] = values[: part.num_slots]
                del values[: part.num_slots]
            assert not values


class TierBench(Bench):
    """A Bench whose scheduler has a host tier of so many slots; what was used longest ago goes first."""

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        num_blocks: int | Sequence[int] = 0,
        *,
        host_slots: int = 1 << 20,
        loses: float = 0.0,
        delay_steps: int = 0,
        seed: int = 0,
        **config,
    ) -> None:
        super().__init__(specs, num_blocks, **{"eviction_policy": "lru"} | config)
        chance = random.Random(seed)
        self.store = FlakyStore(host_slots, loses=loses, rng=chance)
        self.tiers = TieredConnector(self.coordinator, self.store)
        self.scheduler = Scheduler(self.scheduler.config, self.coordinator, connector=self.tiers)
        self.device = TierDevice(self.coordinator, self.store, delay_steps=delay_steps, rng=chance)

    def launch(self) -> bool:
        self.device.advance()
        return super().launch()
