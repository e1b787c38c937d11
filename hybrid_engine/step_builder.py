"""From requests to the plan of a step, while the scheduler decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hybrid_engine.groups.block import Block
from hybrid_engine.request import Request
from hybrid_engine.step_plan import (
    BlockCopy,
    BlockId,
    NewBlocks,
    RequestId,
    StartedRequest,
    StateCapture,
    StepPlan,
)


class StepBuilder:
    """Collects what one step runs, to freeze it in a StepPlan."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.num_computed: list[int] = []
        self.num_scheduled: list[int] = []
        self.started: list[StartedRequest] = []
        self.new_blocks: list[NewBlocks] = []
        self.block_copies: list[BlockCopy] = []
        self.state_captures: list[StateCapture] = []

    def add(self, request: Request, num_new_tokens: int) -> None:
        """Let a request compute its next tokens."""
        self.requests.append(request)
        self.num_computed.append(request.num_computed_tokens)
        self.num_scheduled.append(num_new_tokens)

    def build(self, step_id: int, ended_ids: Iterable[RequestId]) -> StepPlan:
        """Return the plan."""
        sizes = zip(self.requests, self.num_computed, self.num_scheduled, strict=True)
        return StepPlan(
            step_id=step_id,
            request_ids=tuple([request.request_id for request in self.requests]),
            num_computed_tokens=tuple(self.num_computed),
            num_scheduled_tokens=tuple(self.num_scheduled),
            is_sampled=tuple([computed + new == len(request.token_ids) for request, computed, new in sizes]),
            started=tuple(self.started),
            new_blocks=tuple(self.new_blocks),
            block_copies=tuple(self.block_copies),
            state_captures=tuple(self.state_captures),
            ended_ids=tuple(ended_ids),
        )


def start(request: Request) -> StartedRequest:
    """Return what a runner must be told of a request that it does not know."""
    held = request.held
    assert held is not None
    return StartedRequest(
        request_id=request.request_id,
        token_ids=tuple(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        block_ids=tuple([block_ids(table) for table in held.tables]),
        sampling=request.sampling,
        seed=request.seed,
    )


def block_ids(table: Sequence[Block]) -> tuple[BlockId, ...]:
    """Return the ids of a table's blocks."""
    return tuple([block.block_id for block in table])
