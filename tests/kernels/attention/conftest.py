"""Random caches whose unseen slots are NaN, and the tolerances of attention."""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hybrid_engine.kernels.attention import AttentionMeta, attention, fallback, reference

TOLERANCE = {
    # Sums of a few hundred float32 terms in another order.
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    # The fast paths round softmax weights to bfloat16 (8 bits) before they weigh the values, and the result once more:
    # 2^-8 relative to values of about 3.
    torch.bfloat16: {"rtol": 2e-2, "atol": 1.5e-2},
}


@dataclass
class Problem:
    """One call of attention."""

    q_THD: Tensor
    k_cache_BKPD: Tensor
    v_cache_BKPD: Tensor
    meta: AttentionMeta
    options: dict

    def run(self, function=attention) -> Tensor:
        return function(
            self.q_THD,
            k_cache_BKPD=self.k_cache_BKPD,
            v_cache_BKPD=self.v_cache_BKPD,
            meta=self.meta,
            scale=self.q_THD.shape[2] ** -0.5,
            **self.options,
        )

    def as_exact(self, first: int = 0, end: int | None = None) -> Tensor:
        """What an exact call gives of the queries [first, end) of its one request, computed in a step of their own."""
        num_queries = len(self.q_THD)
        end = num_queries if end is None else end
        num_keys = int(self.meta.num_keys[0]) - num_queries + end
        starts = torch.tensor([0, end - first], dtype=torch.int32)
        meta = AttentionMeta(
            starts,
            torch.tensor([num_keys], dtype=torch.int32),
            self.meta.block_tables_RB,
            self.meta.slots_T[first:end],
            is_exact=True,
        )
        return replace(self, q_THD=self.q_THD[first:end], meta=meta).run()

    def check_exact(self, *ends: int) -> None:
        """Exact calls agree with the reference, and those of chunks that end there have the bits of the whole."""
        whole = self.as_exact()
        torch.testing.assert_close(whole, self.run(reference.attention), **TOLERANCE[self.q_THD.dtype])
        chunks = [self.as_exact(first, end) for first, end in pairwise([0, *ends, len(whole)])]
        assert torch.equal(torch.cat(chunks), whole)

    def check(self) -> None:
        """The public function agrees with the reference."""
        torch.testing.assert_close(self.run(), self.run(reference.attention), **TOLERANCE[self.q_THD.dtype])


def lowest_seen(num_queries: int, num_keys: int, options: dict) -> int:
    first = num_keys - num_queries
    return reference.first_visible(first, window=options.get("window"), chunk=options.get("chunk"))


def make_problem(
    *, num_queries, num_keys, heads=4, kv_heads=2, size=32, v_size=None, block_size=16, dtype=torch.float32, **options
) -> Problem:
    """Requests with blocks in random order; whatever no query sees is NaN, table entries that nobody needs are wild."""
    needs = [-(-n // block_size) for n in num_keys]
    num_blocks = sum(needs) + 3
    order = (torch.randperm(num_blocks - 1) + 1).tolist()
    sizes = (size, v_size or size)
    tables, caches = [], [torch.full((num_blocks, kv_heads, block_size, each), torch.nan) for each in sizes]
    for queries, keys, need in zip(num_queries, num_keys, needs, strict=True):
        table, order = order[:need], order[need:]
        lowest = lowest_seen(queries, keys, options)
        for position in range(lowest, keys):
            for cache in caches:
                cache[table[position // block_size], :, position % block_size] = torch.randn(kv_heads, cache.shape[3])
        tables.append(table)
    meta = AttentionMeta.build(num_queries=num_queries, num_keys=num_keys, block_tables=tables, block_size=block_size)
    for row, (queries, keys, need) in enumerate(zip(num_queries, num_keys, needs, strict=True)):
        meta.block_tables_RB[row, : lowest_seen(queries, keys, options) // block_size] = -(10**6)
        meta.block_tables_RB[row, need:] = 10**6
    q_THD = torch.randn(sum(num_queries), heads, size).to(dtype)
    return Problem(q_THD, caches[0].to(dtype), caches[1].to(dtype), meta, options)


@pytest.fixture
def without_torch(monkeypatch):
    """Let what falls back to torch fail."""

    def refuse(*_, **__):
        raise AssertionError("went through torch")

    monkeypatch.setattr(fallback, "attention", refuse)


@pytest.fixture
def problem():
    return make_problem


def make_shared_problem(
    *, prefixes, own_keys, heads=4, kv_heads=2, size=32, block_size=16, dtype=torch.float32, num_queries=None, **options
) -> Problem:
    """Requests of one query whose tables begin with the same blocks.

    prefixes: for each request, (name, blocks) in order, the same name for the same blocks; own_keys: behind them.
    """
    names = {name: num_blocks for parts in prefixes for name, num_blocks in parts}
    num_keys = [sum(n for _, n in parts) * block_size + own for parts, own in zip(prefixes, own_keys, strict=True)]
    needs = [-(-n // block_size) - sum(b for _, b in parts) for n, parts in zip(num_keys, prefixes, strict=True)]
    order = iter((torch.randperm(sum(names.values()) + sum(needs)) + 1).tolist())
    blocks = {name: [next(order) for _ in range(n)] for name, n in names.items()}
    tables = [
        [block for name, _ in parts for block in blocks[name]] + [next(order) for _ in range(need)]
        for parts, need in zip(prefixes, needs, strict=True)
    ]
    caches = [torch.randn(sum(names.values()) + sum(needs) + 1, kv_heads, block_size, size).to(dtype) for _ in "kv"]
    for cache in caches:
        cache[0] = torch.nan
    num_queries = num_queries or [1] * len(num_keys)
    meta = AttentionMeta.build(
        num_queries=num_queries, num_keys=num_keys, block_tables=tables, block_size=block_size, is_shared=True
    )
    return Problem(torch.randn(sum(num_queries), heads, size).to(dtype), caches[0], caches[1], meta, options)


@pytest.fixture
def shared_problem():
    return make_shared_problem
