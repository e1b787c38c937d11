import pytest

from hybrid_engine.speculation.adaptive import RETRY_TOKENS, AdaptiveDrafter, best_num_drafts


class Echo:
    """Drafts as many zeros as it is asked for."""

    def __init__(self) -> None:
        self.observed = []

    def propose(self, requests, max_drafts):
        return [(0,) * most for most in max_drafts]

    def observe(self, request, num_drafts, num_accepted):
        self.observed.append((request.request_id, num_drafts, num_accepted))


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def drafter(echo) -> AdaptiveDrafter:
    return AdaptiveDrafter(echo, cost=0.1)


def num_drafts(drafter, request, most: int = 8) -> int:
    return len(drafter.propose([request], [most])[0])


def let_fail(drafter, request) -> None:
    """Reject drafts until drafting doesn't pay."""
    for _ in range(40):
        drafter.observe(request, 4, 0)


@pytest.mark.parametrize(
    ("rate", "cost", "best"),
    [
        (0.0, 0.1, 0),
        (0.09, 0.1, 0),  # 1.09 tokens in 1.1 times the time
        (0.2, 0.1, 1),  # 1.2 / 1.1 = 1.09, 1.24 / 1.2 = 1.03
        (0.5, 0.1, 2),  # 1.364, 1.458, 1.442
        (1.0, 0.5, 8),
        (0.9, 1.0, 0),
    ],
)
def test_as_many_drafts_as_bring_the_most_tokens_a_time(rate, cost, best):
    assert best_num_drafts(rate, cost, 8) == best


def test_accepted_drafts_bring_longer_ones_and_rejected_ones_shorter(drafter, make_request):
    request = make_request([1])
    first = num_drafts(drafter, request)
    drafter.observe(request, 3, 0)
    assert 0 < num_drafts(drafter, request) < first
    for _ in range(10):
        drafter.observe(request, 4, 4)
    assert num_drafts(drafter, request) == 8


def test_drafting_that_does_not_pay_stops_and_is_tried_again_with_one_draft(drafter, make_request):
    request = make_request([1])
    let_fail(drafter, request)
    asked = []
    for _ in range(RETRY_TOKENS + 1):
        asked.append(num_drafts(drafter, request))
        request.append_token(1)
    assert asked == [0] * RETRY_TOKENS + [1]


def test_a_try_that_fails_is_the_last_for_a_while(drafter, make_request):
    request = make_request([1])
    let_fail(drafter, request)
    for _ in range(RETRY_TOKENS):
        request.append_token(1)
    drafter.observe(request, 1, 0)
    assert num_drafts(drafter, request) == 0


def test_requests_are_judged_each_by_its_own(drafter, make_request):
    good, bad = make_request([1], "good"), make_request([1], "bad")
    let_fail(drafter, bad)
    for _ in range(10):
        drafter.observe(good, 4, 4)
    assert [len(drafts) for drafts in drafter.propose([good, bad, good], [4, 4, 2])] == [4, 0, 2]


def test_a_new_request_tries_even_after_others_failed(drafter, make_request):
    let_fail(drafter, make_request([1], "old"))
    assert num_drafts(drafter, make_request([1], "new")) > 0


def test_a_new_request_begins_with_longer_drafts_where_those_of_others_were_accepted(drafter, make_request):
    first = num_drafts(drafter, make_request([1], "first"))
    old = make_request([1], "old")
    for _ in range(40):
        drafter.observe(old, 4, 4)
    assert num_drafts(drafter, make_request([1], "new")) > first


def test_the_other_drafter_learns_what_became_of_its_drafts(drafter, echo, make_request):
    drafter.observe(make_request([1]), 4, 2)
    assert echo.observed == [("a", 4, 2)]
