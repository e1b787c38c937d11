"""What crosses from the bookkeeping to the tensors: one step, as plain integers.

The scheduler makes a StepPlan, a runner executes it and answers with a StepResult. The runner mirrors the token
ids and block tables of the requests it has been told of, so that a plan carries only what is new.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NewType

from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.transfer_plan import Load, Transfer

RequestId = NewType("RequestId", str)
BlockId = NewType("BlockId", int)
"""Where a block lies, in the unit of its group's region (`groups/layout.py`). Id 0 is the null block of every group:
never written, never read."""

NULL_BLOCK_ID = BlockId(0)
WHOLE_BLOCK = -1
"""As a number of slots: all that a block has."""


@dataclass(frozen=True, slots=True)
class StartedRequest:
    """A request that the runner has not seen, or that comes back after a preemption."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    """All tokens known: the prompt and, after a preemption, what was generated before."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose cache entries exist already: the hit."""
    block_ids: tuple[tuple[BlockId, ...], ...]
    """The whole block table, by group; NULL_BLOCK_ID where the group needs nothing."""
    sampling: SamplingParams
    seed: int
    """The seed that decides this request's draws; the sampler uses (seed, position) alone."""


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """Blocks appended to the table of a request that the runner knows."""

    request_id: RequestId
    block_ids: tuple[tuple[BlockId, ...], ...]
    """By group; empty where the group got none."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Slots [0, num_slots) of a block, or one state (num_slots 1), to copy before the step writes anything."""

    group_id: int
    source_id: BlockId
    target_id: BlockId
    num_slots: int
    """WHOLE_BLOCK: all of them."""


@dataclass(frozen=True, slots=True)
class BlockMove:
    """A block that lies elsewhere from this step on; a copy among the plan's block copies takes its bytes there."""

    group_id: int
    source_id: BlockId
    target_id: BlockId


@dataclass(frozen=True, slots=True)
class StateCapture:
    """A state to keep: the runner writes what the request's layers hold after exactly `position` tokens."""

    request_id: RequestId
    group_id: int
    position: int
    """Tokens consumed, counted from the request's first; within the chunk that the step computes, its end included."""
    target_id: BlockId
    """The state slot to write; nobody else's."""


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What a step transfers before it computes, in this order; the plan's own block copies come after the saves."""

    saves: tuple[Transfer, ...] = ()
    """Blocks that may be given out again are copied out."""
    copies: tuple[BlockCopy, ...] = ()
    """What a load needs and the device itself has."""
    loads: tuple[Load, ...] = ()
    """They begin, and end in a later step."""

    def __bool__(self) -> bool:
        return bool(self.saves or self.copies or self.loads)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What runs in one step. Entry i of each per-request tuple belongs to request_ids[i]."""

    step_id: int
    request_ids: tuple[RequestId, ...]
    num_computed_tokens: tuple[int, ...]
    """Position of the first token that each request computes in this step."""
    num_scheduled_tokens: tuple[int, ...]
    """Tokens that each request computes in this step, at least 1."""
    is_sampled: tuple[bool, ...]
    """Whether the request's last known token is computed, so that the next one is sampled."""
    draft_token_ids: tuple[tuple[int, ...], ...] = ()
    """Tokens guessed to follow the last known one: computed behind it and counted in num_scheduled_tokens. Empty when
    nobody drafts. In a state group the request's table then has the working slot and one more for each draft: slot j
    takes the state after j tokens of the chunk, and the runner puts the one after the last accepted token back into
    the working slot, so that between two steps it holds the state after all tokens known but the last."""
    started: tuple[StartedRequest, ...] = ()
    new_blocks: tuple[NewBlocks, ...] = ()
    block_copies: tuple[BlockCopy, ...] = ()
    """In this order; a source may be an earlier one's target."""
    block_moves: tuple[BlockMove, ...] = ()
    """In this order. The tables that the runner mirrors are to say so; all that is new in this plan already does."""
    state_captures: tuple[StateCapture, ...] = ()
    transfers: TransferPlan | None = None
    """Bytes that leave the cache or come back; a plan that computes nothing may have some."""
    ended_ids: tuple[RequestId, ...] = ()
    """Requests the runner may forget before this step: finished, aborted or preempted since the last plan."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(self.num_scheduled_tokens)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position."""

    token_id: int
    """The token that was chosen, or that stands in the prompt."""
    logprob: float
    rank: int
    """1 for the likeliest token."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the likeliest tokens, best first."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a runner found."""

    step_id: int
    sampled: dict[RequestId, tuple[int, ...]]
    """What each request with is_sampled goes on with: the drafts that were accepted, and one token more."""
    finished: dict[RequestId, str] = field(default_factory=dict)
    """Why a structured output ends with the last of those tokens: 'stop' when nothing can be added to it, 'error' when
    its grammar grew too complex to go on."""
    logprobs: dict[RequestId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """Of those tokens, for requests that asked for them."""
    prompt_logprobs: dict[RequestId, list[TokenLogprobs]] = field(default_factory=dict)
    """For requests that asked: one for each token of the chunk whose successor is in the prompt, in order."""
    seconds: float = 0.0
    """How long the step took, to weigh computing against fetching; 0: not measured."""
