"""When which call is submitted."""

from hybrid_engine.bench.sessions import Sessions
from hybrid_engine.bench.workload import TokenPrompt, WorkItem


def item(session: str, name: int, **when) -> WorkItem:
    """A call that is known by the number of its prompt's only token."""
    return WorkItem(session, TokenPrompt(([name],)), 1, [0], **when)


def play(items: list[WorkItem], *, concurrency: int = 8, keeps_pace: bool = True, call_s: float = 10.0) -> dict:
    """Let every call take so long; return when each was submitted."""
    sessions = Sessions(items, concurrency=concurrency, keeps_pace=keeps_pace)
    now, submitted, running = 0.0, {}, []
    while True:
        for call, _ in sessions.take_due(now):
            submitted[call.prompt.token_ids()[0]] = now
            running.append((now + call_s, call.session))
        next_times = [sessions.next_time] if sessions.next_time is not None else []
        ends = min((end for end, _ in running), default=None)
        if ends is None and not next_times:
            return submitted
        now = min([*next_times, *([ends] if ends is not None else [])])
        for ended in [each for each in running if each[0] == now]:
            running.remove(ended)
            sessions.end(ended[1], now)


def test_a_call_comes_when_the_one_before_has_ended_and_the_thinking_is_over():
    assert play([item("a", 1), item("a", 2, think_s=5.0), item("a", 3)]) == {1: 0, 2: 15, 3: 25}


def test_at_full_speed_nobody_thinks_and_nothing_is_awaited():
    items = [item("a", 1, arrival_s=70.0), item("a", 2, think_s=5.0), item("a", 3, arrival_s=900.0)]
    assert play(items, keeps_pace=False) == {1: 0, 2: 10, 3: 20}


def test_sessions_arrive_in_their_time_and_later_calls_in_theirs():
    items = [item("a", 1, arrival_s=3.0), item("b", 2, arrival_s=4.0), item("a", 3, arrival_s=50.0)]
    assert play(items) == {1: 3, 2: 4, 3: 50}


def test_a_session_that_waits_for_a_place_keeps_its_distances():
    items = [item("a", 1), item("b", 2, arrival_s=1.0), item("b", 3, arrival_s=31.0)]
    assert play(items, concurrency=1) == {1: 0, 2: 10, 3: 40}


def test_an_agent_starts_after_its_parents_call_and_takes_no_place():
    items = [item("a", 1), item("x", 2, parent="a", parent_turn=0, think_s=2.0), item("a", 3, think_s=1.0)]
    assert play([*items, item("b", 4)], concurrency=1) == {1: 0, 2: 12, 3: 11, 4: 22}


def test_a_call_waits_for_the_agents_whose_reports_it_shows():
    items = [
        item("a", 1),
        item("x", 2, parent="a"),
        item("x", 3, think_s=7.0),
        item("a", 4, think_s=1.0, waits_for=("x",)),
    ]
    assert play(items) == {1: 0, 2: 10, 3: 27, 4: 38}


def test_an_agent_of_nobody_here_is_a_session_like_others():
    assert play([item("x", 1, parent="gone", think_s=3.0)]) == {1: 3}


def test_an_agent_sent_by_a_call_that_never_comes_starts_at_the_end():
    assert play([item("a", 1), item("x", 2, parent="a", parent_turn=5)]) == {1: 0, 2: 10}


def test_each_call_is_handed_out_with_the_one_that_follows_it():
    sessions = Sessions([item("a", 1), item("a", 2)], concurrency=1, keeps_pace=True)
    ((first, following),) = sessions.take_due(0.0)
    assert (first.prompt.token_ids(), following.prompt.token_ids()) == ([1], [2])
    sessions.end("a", 1.0)
    ((_, following),) = sessions.take_due(1.0)
    assert following is None
