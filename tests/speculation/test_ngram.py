import random

import pytest

from hybrid_engine.request import Request
from hybrid_engine.speculation.ngram import NgramDrafter


def propose(drafter: NgramDrafter, request: Request, num_drafts: int = 4) -> tuple[int, ...]:
    (drafts,) = drafter.propose([request], [num_drafts])
    return drafts


@pytest.fixture
def drafter() -> NgramDrafter:
    return NgramDrafter(min_tokens=2, max_tokens=3)


def slow_drafts(token_ids: list[int], num_drafts: int, lengths: range) -> tuple[int, ...]:
    """What is to be found, by looking at every place."""
    for length in lengths:
        for end in range(len(token_ids) - 1, length - 1, -1):
            if len(token_ids) > length and token_ids[end - length : end] == token_ids[-length:]:
                known = list(token_ids)
                for i in range(num_drafts):
                    known.append(known[end + i])
                return tuple(known[len(token_ids) :])
    return ()


def test_the_longest_ngram_is_preferred_to_a_later_one(drafter, make_request):
    assert propose(drafter, make_request([1, 2, 3, 50, 51, 52, 53, 9, 2, 3, 60, 1, 2, 3])) == (50, 51, 52, 53)


def test_of_equally_long_ones_the_last_counts(drafter, make_request):
    assert propose(drafter, make_request([2, 3, 60, 7, 2, 3, 61, 8, 8, 2, 3]), 2) == (61, 8)


def test_nothing_is_drafted_where_the_last_tokens_are_new(drafter, make_request):
    assert propose(drafter, make_request([1, 2, 3, 4, 5, 1, 3])) == ()
    assert propose(drafter, make_request([1])) == ()


def test_a_period_goes_on_past_the_known_tokens(drafter, make_request):
    assert propose(drafter, make_request([5, 6, 5, 6, 5, 6]), 5) == (5, 6, 5, 6, 5)


def test_each_request_gets_its_own_number_of_drafts(drafter, make_request):
    requests = [make_request([1, 2, 9, 8, 7, 1, 2], request_id) for request_id in "abc"]
    assert drafter.propose(requests, [3, 0, 1]) == [(9, 8, 7), (), (9,)]


@pytest.mark.parametrize("seed", range(5))
def test_drafts_of_a_growing_answer_are_those_of_an_exhaustive_search(seed, make_request):
    rng = random.Random(seed)
    lengths = range(4, 0, -1)
    drafter = NgramDrafter(min_tokens=1, max_tokens=4)
    request = make_request([rng.randrange(4) for _ in range(rng.randrange(1, 30))])
    for _ in range(60):
        assert propose(drafter, request, 3) == slow_drafts(request.token_ids, 3, lengths)
        for _ in range(rng.randrange(1, 4)):
            request.append_token(rng.randrange(4))


def test_an_index_goes_with_its_request(drafter, make_request):
    request = make_request([1, 2, 3, 1, 2])
    assert propose(drafter, request, 1) == (3,)
    assert len(drafter._indexes) == 1
    del request
    assert len(drafter._indexes) == 0
