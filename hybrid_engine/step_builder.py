"""From requests to the plan of a step, while the scheduler decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hybrid_engine.checkpoint_recorder import CheckpointRecorder, PlannedCapture
from hybrid_engine.config import SchedulerConfig
from hybrid_engine.groups.base import NEVER
from hybrid_engine.groups.block import Block
from hybrid_engine.request import Request
from hybrid_engine.step_plan import (
    BlockCopy,
    BlockId,
    BlockMove,
    NewBlocks,
    RequestId,
    StartedRequest,
    StateCapture,
    StepPlan,
)


class StepBuilder:
    """Collects what one step runs, to freeze it in a StepPlan; knows what is left of the step's budgets."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.num_positions_left = config.max_num_batched_tokens or NEVER
        """Input positions left: a request takes its tokens and, used or not, its draft slots."""
        self.num_tokens_left = min(config.max_num_scheduled_tokens, self.num_positions_left)
        """Tokens that the step may still compute; without draft slots positions never end before them."""
        self.draft_slots = config.draft_slots
        self.most_tokens = config.long_prefill_token_threshold or NEVER
        self.requests: list[Request] = []
        self.num_computed: list[int] = []
        self.num_scheduled: list[int] = []
        self.is_sampled: list[bool] = []
        self.drafts: dict[RequestId, tuple[int, ...]] = {}
        # As blocks, since they may be moved before the step is planned to its end.
        self.started: list[Request] = []
        self.new_blocks: list[tuple[Request, list[list[Block]]]] = []
        self._captures: list[PlannedCapture] = []

    @property
    def most_new_tokens(self) -> int:
        """Tokens that one more request may compute; below 1: the step is full."""
        return min(self.num_tokens_left, self.num_positions_left - self.draft_slots, self.most_tokens)

    def add(
        self,
        request: Request,
        position: int,
        num_new_tokens: int,
        *,
        is_sampled: bool,
        drafts: tuple[int, ...] = (),
    ) -> None:
        """Let a request compute its tokens from a position on; is_sampled: its last known one is among them.

        drafts: the last of these tokens, which are only guessed.
        """
        self.requests.append(request)
        self.num_computed.append(position)
        self.num_scheduled.append(num_new_tokens)
        self.is_sampled.append(is_sampled)
        self.num_tokens_left -= num_new_tokens
        self.num_positions_left -= num_new_tokens + self.draft_slots
        if drafts:
            self.drafts[request.request_id] = drafts
            self.num_positions_left += len(drafts)

    def mark_launched(self, recorder: CheckpointRecorder) -> None:
        """Note in the requests what the step computes of them, and which of their states it is to keep."""
        sizes = zip(self.num_computed, self.num_scheduled, self.is_sampled, strict=True)
        for request, (position, num_new, is_sampled) in zip(self.requests, sizes, strict=True):
            kept = request.checkpoint_positions
            if kept and kept[-1] > position:
                self._captures += recorder.take_captures(request, num_new)
            request.num_in_flight_tokens += num_new
            if is_sampled:
                request.num_placeholders += 1

    def build(
        self,
        step_id: int,
        ended_ids: Iterable[RequestId],
        *,
        copies: tuple[BlockCopy, ...],
        moves: tuple[BlockMove, ...],
    ) -> StepPlan:
        """Return the plan; nothing can be moved any more that it names.

        copies, moves: what must be copied before the step writes anything, and which of that are moves.
        """
        request_ids = tuple([request.request_id for request in self.requests])
        return StepPlan(
            step_id=step_id,
            request_ids=request_ids,
            num_computed_tokens=tuple(self.num_computed),
            num_scheduled_tokens=tuple(self.num_scheduled),
            is_sampled=tuple(self.is_sampled),
            draft_token_ids=tuple([self.drafts.get(request_id, ()) for request_id in request_ids])
            if self.drafts
            else (),
            started=tuple(map(_start, self.started)),
            new_blocks=tuple(
                [NewBlocks(request.request_id, tuple(map(_block_ids, tables))) for request, tables in self.new_blocks]
            ),
            block_copies=copies,
            block_moves=moves,
            state_captures=tuple(
                [
                    StateCapture(request.request_id, group_id, position, target.block_id)
                    for request, group_id, position, target in self._captures
                ]
            ),
            ended_ids=tuple(ended_ids),
        )


def _start(request: Request) -> StartedRequest:
    """Return what a runner must be told of a request that it does not know."""
    held = request.held
    assert held is not None
    return StartedRequest(
        request_id=request.request_id,
        token_ids=request.all_token_ids(),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        block_ids=tuple([_block_ids(table) for table in held.tables]),
        sampling=request.sampling,
        seed=request.seed,
    )


def _block_ids(table: Sequence[Block]) -> tuple[BlockId, ...]:
    """Return the ids of a table's blocks."""
    return tuple([block.block_id for block in table])
