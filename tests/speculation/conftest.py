"""Requests by hand, and a drafter that guesses as it is told."""

from collections.abc import Callable, Sequence

import pytest

from hybrid_engine.groups.hashing import BlockHasher
from hybrid_engine.request import Request
from hybrid_engine.sampling_params import SamplingParams


@pytest.fixture(scope="session")
def make_request() -> Callable[..., Request]:
    """Make a request that knows these tokens."""
    hasher = BlockHasher(16)

    def make(token_ids: Sequence[int], request_id: str = "a", **sampling) -> Request:
        return Request(request_id, token_ids, SamplingParams(**sampling), hasher=hasher, max_model_len=100_000, seed=17)

    return make
