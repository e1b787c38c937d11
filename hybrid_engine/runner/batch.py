"""What the runner mirrors of the requests it knows, and how a plan becomes packed tensors.

Each known request has a row in a few arrays: its tokens, and a block table for each group. A plan says what is new,
and a step gathers from the rows with a handful of array operations, whatever the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybrid_engine.groups.layout import MemoryLayout
from hybrid_engine.groups.spec import MambaSpec
from hybrid_engine.kernels.attention import AttentionMeta, Extent
from hybrid_engine.kernels.attention.shared import SharedKeys, SharedRange, count_tiles, make_tables
from hybrid_engine.kernels.ssm import PIECE_TOKENS, StateMeta
from hybrid_engine.runner.block_tables import FIRST_ROWS, BlockTables, Row, grown
from hybrid_engine.runner.sampler import RequestSampling
from hybrid_engine.runner.shared_prefixes import SharedPrefixes
from hybrid_engine.runner.staging import Staging
from hybrid_engine.step_plan import NULL_BLOCK_ID, RequestId, StartedRequest, StepPlan

_NO_SLOT = -1
"""Where tokens go that only fill up a decode step."""
_MIN_DECODE_KEYS = 512
_FIRST_TOKENS = 256


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What a decode step is filled up to: requests, keys of the longest one, tiles of shared keys in each group."""

    num_requests: int
    num_keys: int
    num_tiles: tuple[int, ...] = ()
    """Empty: none in any group."""

    @classmethod
    def covering(cls, num_requests: int, num_keys: int, num_tiles: Sequence[int] = ()) -> DecodeShape:
        """The next one of few: powers of two, above 8 requests multiples of 8."""
        rounded = 1 << (num_requests - 1).bit_length() if num_requests <= 8 else -(-num_requests // 8) * 8
        tiles = tuple(1 << (number - 1).bit_length() if number else 0 for number in num_tiles)
        return cls(rounded, max(_MIN_DECODE_KEYS, 1 << (num_keys - 1).bit_length()), tiles if any(tiles) else ())


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One step's input, request after request in the plan's order, with nothing between them."""

    token_ids_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64, each token's place in its own request."""
    metas: tuple[AttentionMeta | StateMeta, ...]
    """By group."""
    rows: np.ndarray
    """int64 [R]."""
    starts: np.ndarray
    """int64 [R + 1], token offset of each request, then T."""
    num_drafts: np.ndarray
    """int64 [R], how many of each request's tokens are drafts: its last ones."""
    num_spared_keys: int
    """Reads of a key that shared prefixes spare in one layer of each group."""


class BatchState:
    """The requests that the runner knows."""

    def __init__(
        self,
        layout: MemoryLayout,
        *,
        vocab_size: int,
        device: torch.device | str = "cpu",
        most_shared_queries: Sequence[int] | None = None,
        exact: bool = False,
    ) -> None:
        """layout: which block ids there are. exact: as Model.is_exact.

        most_shared_queries: for each group, of a request that can share the reading of keys; None: nobody shares.
        """
        self._is_exact = exact
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._staging = Staging(device)
        self.tables = tuple(BlockTables(group, layout.num_ids(i)) for i, group in enumerate(layout.groups))
        most_queries = most_shared_queries or [0] * len(self.tables)
        self._shared = [SharedPrefixes(*pair) for pair in zip(self.tables, most_queries, strict=True)]
        self._row_of: dict[RequestId, Row] = {}
        self._samplings: list[RequestSampling | None] = [None] * FIRST_ROWS
        # Taken from the end, so that few requests keep to the first rows.
        self._free_rows = [Row(row) for row in reversed(range(FIRST_ROWS))]
        self._token_ids = np.zeros((FIRST_ROWS, _FIRST_TOKENS), np.int32)
        self._num_tokens = np.zeros(FIRST_ROWS, np.int64)

    @property
    def num_requests(self) -> int:
        """Requests known."""
        return len(self._row_of)

    def sampling(self, row: int) -> RequestSampling:
        """Return what the sampler needs to know of the request in a row."""
        found = self._samplings[row]
        assert found is not None, f"no request in row {row}"
        return found

    def num_tokens(self, rows: np.ndarray) -> np.ndarray:
        """Return how many tokens are known of the requests in these rows: int64 [R]."""
        return self._num_tokens[rows]

    def token_ids(self, row: int, start: int, end: int) -> np.ndarray:
        """Return known tokens [start, end) of the request in a row."""
        assert 0 <= start <= end <= self._num_tokens[row], f"tokens {start} .. {end} of {self._num_tokens[row]}"
        return self._token_ids[row, start:end]

    # A plan's news

    def apply(self, plan: StepPlan, prepare_sampling: Callable[[StartedRequest, np.ndarray], RequestSampling]) -> None:
        """Forget what ended, note what was moved, then take in what started and what got new blocks."""
        for request_id in plan.ended_ids:
            # It may have ended before it ever started here.
            row = self._row_of.pop(request_id, None)
            if row is not None:
                self._samplings[row] = None
                self._free_rows.append(row)
        if plan.block_moves:
            for tables in self.tables:
                moves = [move for move in plan.block_moves if move.group_id == tables.group.group_id]
                if moves:
                    tables.move(moves)
        for started in plan.started:
            self._start(started, prepare_sampling)
        for new in plan.new_blocks:
            row = self._find_row(new.request_id)
            for tables, block_ids in zip(self.tables, new.block_ids, strict=True):
                if block_ids:
                    tables.append(row, block_ids)

    def _start(
        self, started: StartedRequest, prepare_sampling: Callable[[StartedRequest, np.ndarray], RequestSampling]
    ) -> None:
        assert started.request_id not in self._row_of, f"request {started.request_id} started twice"
        token_ids = np.array(started.token_ids, np.int64)
        assert ((token_ids >= 0) & (token_ids < self.vocab_size)).all(), (
            f"{started.request_id} has tokens {token_ids.min()} .. {token_ids.max()}, "
            f"the vocabulary has {self.vocab_size}"
        )
        if not self._free_rows:
            self._grow_rows()
        row = self._free_rows.pop()
        self._row_of[started.request_id] = row
        self._samplings[row] = prepare_sampling(started, token_ids)
        self._token_ids = grown(self._token_ids, len(self._token_ids), len(token_ids))
        self._token_ids[row, : len(token_ids)] = token_ids
        self._num_tokens[row] = len(token_ids)
        for tables, block_ids in zip(self.tables, started.block_ids, strict=True):
            tables.start(row, block_ids)

    def _grow_rows(self) -> None:
        old, new = len(self._num_tokens), 2 * len(self._num_tokens)
        self._free_rows.extend(Row(row) for row in reversed(range(old, new)))
        self._samplings.extend([None] * old)
        self._token_ids = grown(self._token_ids, new, self._token_ids.shape[1])
        self._num_tokens = np.resize(self._num_tokens, new)
        for tables in self.tables:
            tables.grow_rows(new)

    def _find_row(self, request_id: RequestId) -> Row:
        row = self._row_of.get(request_id)
        assert row is not None, f"request {request_id} is not known to the runner"
        return row

    # A step's tensors

    def decode_shape(self, plan: StepPlan) -> DecodeShape:
        """Return what to fill up a plan to in which each request has one token."""
        rows = np.array([self._find_row(request_id) for request_id in plan.request_ids])
        num_keys = np.array(plan.num_computed_tokens) + 1
        found = [shared.find(rows, np.ones_like(num_keys), num_keys) for shared in self._shared]
        return DecodeShape.covering(len(rows), int(num_keys.max()), [count_tiles(ranges) for ranges in found])

    def pack(self, plan: StepPlan, *, staging: Staging | None = None, shape: DecodeShape | None = None) -> PackedBatch:
        """Gather what a step computes; plan.request_ids must not be empty.

        staging: how the arrays get to the device; None: this object's own. shape: fill a step up to it in which each
        request has one token, with requests that touch nothing; on a GPU alone.
        """
        staging = staging or self._staging
        staging.begin()
        rows = np.array([self._find_row(request_id) for request_id in plan.request_ids])
        num_queries = np.array(plan.num_scheduled_tokens)
        num_keys = np.array(plan.num_computed_tokens) + num_queries
        num_drafts = self._put_drafts(plan, rows)
        self._check(plan, rows, num_queries, num_keys, num_drafts)
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(num_queries, out=starts[1:])
        # Token t of request r stands at num_keys[r] - (starts[r + 1] - t).
        requests_T = np.repeat(np.arange(len(rows)), num_queries)
        positions_T = np.arange(starts[-1]) + (num_keys - starts[1:])[requests_T]
        token_ids_T = self._token_ids[rows[requests_T], positions_T].astype(np.int64)
        num_padding = 0 if shape is None else shape.num_requests - len(rows)
        all_starts = np.concatenate([starts, starts[-1] + 1 + np.arange(num_padding)]).astype(np.int32)
        query_starts = staging.put(all_starts)
        num_keys_R = staging.put(_filled_up(num_keys.astype(np.int32), num_padding, 0))
        extent = Extent.of(num_queries, num_keys) if shape is None else Extent(1, shape.num_keys)
        ranges = [shared.find(rows, num_queries, num_keys) for shared in self._shared]
        packed = PackedBatch(
            token_ids_T=staging.put(_filled_up(token_ids_T, num_padding, 0)),
            positions_T=staging.put(_filled_up(positions_T, num_padding, 0)),
            metas=tuple(
                self._state_meta(tables, plan, rows, num_drafts, num_padding, staging)
                if isinstance(tables.group.spec, MambaSpec)
                else AttentionMeta(
                    query_starts,
                    num_keys_R,
                    *self._locate(tables, rows, num_keys, requests_T, positions_T, shape, staging),
                    known_extent=extent,
                    is_exact=self._is_exact,
                    shared=_share(ranges[group_id], group_id, len(all_starts) - 1, shape, staging),
                )
                for group_id, tables in enumerate(self.tables)
            ),
            rows=rows,
            starts=starts,
            num_drafts=num_drafts,
            num_spared_keys=sum(shared.num_spared_keys for found in ranges for shared in found),
        )
        staging.send()
        return packed

    def _put_drafts(self, plan: StepPlan, rows: np.ndarray) -> np.ndarray:
        """Write each request's drafts behind its known tokens, to which they do not belong yet; return their counts."""
        num_drafts = np.zeros(len(rows), np.int64)
        for index, drafts in enumerate(plan.draft_token_ids):
            if not drafts:
                continue
            row, num_drafts[index] = rows[index], len(drafts)
            assert plan.is_sampled[index], f"{plan.request_ids[index]} has drafts behind tokens not yet computed"
            assert 0 <= min(drafts) <= max(drafts) < self.vocab_size, (
                f"{plan.request_ids[index]} has drafts {drafts}, the vocabulary has {self.vocab_size}"
            )
            start, end = self._num_tokens[row], self._num_tokens[row] + len(drafts)
            self._token_ids = grown(self._token_ids, len(self._token_ids), end)
            self._token_ids[row, start:end] = drafts
        return num_drafts

    def _locate(
        self,
        tables: BlockTables,
        rows: np.ndarray,
        num_keys: np.ndarray,
        requests_T: np.ndarray,
        positions_T: np.ndarray,
        shape: DecodeShape | None,
        staging: Staging,
    ) -> tuple[Tensor, Tensor]:
        """Return one group's block_tables_RB, and slots_T, where the new tokens go."""
        block_size = tables.group.block_size
        block_tables_RB = tables.gather(rows, num_keys)
        blocks_T = block_tables_RB[requests_T, positions_T // block_size].astype(np.int64)
        assert (blocks_T != NULL_BLOCK_ID).all(), (
            f"group {tables.group.group_id}: the null block stands where positions "
            f"{positions_T[blocks_T == NULL_BLOCK_ID]} are to be written"
        )
        slots_T = blocks_T * block_size + positions_T % block_size
        if shape is not None:
            wide = np.full((shape.num_requests, -(-shape.num_keys // block_size)), NULL_BLOCK_ID, np.int32)
            wide[: len(rows), : block_tables_RB.shape[1]] = block_tables_RB
            block_tables_RB, slots_T = wide, _filled_up(slots_T, shape.num_requests - len(rows), _NO_SLOT)
        return staging.put(block_tables_RB), staging.put(slots_T)

    def _state_meta(
        self,
        tables: BlockTables,
        plan: StepPlan,
        rows: np.ndarray,
        num_drafts: np.ndarray,
        num_padding: int,
        staging: Staging,
    ) -> StateMeta:
        """Return where one group's states lie, and which are to be kept on the way: those asked for, and one a draft.

        The state before a draft goes to the draft's slot, since that is where a request goes on if it is rejected.
        """
        slots = tables.state_slots(rows, num_drafts)
        index_of = {request_id: index for index, request_id in enumerate(plan.request_ids)}
        captures: list[tuple[int, int, int]] = []
        for capture in plan.state_captures:
            if capture.group_id == tables.group.group_id:
                index = index_of[capture.request_id]
                num_tokens = capture.position - plan.num_computed_tokens[index]
                assert 1 <= num_tokens <= plan.num_scheduled_tokens[index], (
                    f"{capture} lies outside {plan.num_scheduled_tokens[index]} tokens "
                    f"from {plan.num_computed_tokens[index]} on"
                )
                captures.append((index, num_tokens, capture.target_id))
        for index in np.flatnonzero(num_drafts).tolist():
            num_known = plan.num_scheduled_tokens[index] - int(num_drafts[index])
            captures += [
                (index, num_known + draft, int(slots[index, draft + 1])) for draft in range(int(num_drafts[index]))
            ]
        return StateMeta.build(
            num_queries=plan.num_scheduled_tokens,
            slots=slots[:, 0].tolist(),
            has_history=[num_tokens > 0 for num_tokens in plan.num_computed_tokens],
            captures=captures,
            put=staging.put,
            piece_size=None if staging.is_on_host or self._is_exact else PIECE_TOKENS,
            num_padding=num_padding,
            is_exact=self._is_exact,
        )

    def _check(
        self,
        plan: StepPlan,
        rows: np.ndarray,
        num_queries: np.ndarray,
        num_keys: np.ndarray,
        num_drafts: np.ndarray,
    ) -> None:
        num_tokens = self._num_tokens[rows] + num_drafts
        assert len(set(plan.request_ids)) == len(rows), f"a request stands twice in {plan.request_ids}"
        assert (num_queries > 0).all(), f"chunks of {num_queries.tolist()} tokens"
        # One computed past its last known token, or sampled elsewhere than at it, is wrong.
        assert (np.sign(num_tokens - num_keys) == np.where(plan.is_sampled, 0, 1)).all(), (
            f"{plan.request_ids} computed up to {num_keys.tolist()} of {num_tokens.tolist()} tokens, "
            f"sampled: {plan.is_sampled}"
        )

    # What a step found

    def append_tokens(self, rows: np.ndarray, token_ids: Sequence[Sequence[int]]) -> None:
        """Put each row's new tokens behind its known ones."""
        counts = np.array([len(tokens) for tokens in token_ids])
        starts = np.cumsum(counts) - counts
        rows_X = np.repeat(rows, counts)
        positions_X = self._num_tokens[rows_X] + np.arange(len(rows_X)) - np.repeat(starts, counts)
        self._token_ids = grown(self._token_ids, len(self._token_ids), int(positions_X.max()) + 1)
        self._token_ids[rows_X, positions_X] = np.concatenate(token_ids)
        self._num_tokens[rows] += counts


def _share(
    ranges: list[SharedRange], group_id: int, num_requests: int, shape: DecodeShape | None, staging: Staging
) -> SharedKeys | None:
    num_tiles = shape.num_tiles[group_id] if shape is not None and shape.num_tiles else count_tiles(ranges)
    if num_tiles == 0:
        return None
    tiles_XC, spans_R2 = make_tables(ranges, num_requests, num_tiles=num_tiles)
    return SharedKeys(staging.put(tiles_XC), staging.put(spans_R2))


def _filled_up(array: np.ndarray, num_padding: int, value: int) -> np.ndarray:
    return np.concatenate([array, np.full(num_padding, value, array.dtype)]) if num_padding else array
