"""What agents do to their prompts, one habit at a time."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from hybrid_engine.bench.generator.distributions import LogNormal
from hybrid_engine.bench.generator.measurement import common_tokens
from hybrid_engine.bench.generator.presets import preset
from hybrid_engine.bench.generator.sessions import generate
from hybrid_engine.bench.generator.settings import Resumed, SubAgents, WorkloadSettings
from hybrid_engine.errors import ConfigError


def always(value: float) -> LogNormal:
    return LogNormal(value, value)


PLAIN = WorkloadSettings(
    system_tokens=always(20),
    tools_tokens=always(30),
    opening_tokens=always(10),
    turns=always(6),
    answer_tokens=always(8),
    result_tokens=always(5),
    user_think_s=always(9),
    num_sessions=4,
    block_tokens=None,
    vocabulary_size=1_000_000,
)
CHILDREN = SubAgents(share=1.0, children=always(2), stem_tokens=always(15), task_tokens=always(3), turns=always(2))


def sessions(settings):
    found = defaultdict(list)
    for item in generate(settings):
        found[item.session].append(item)
    return found


def test_a_session_adds_to_its_prompt_and_loses_nothing():
    for calls in sessions(PLAIN).values():
        assert [call.prompt.num_tokens for call in calls] == [60 + 13 * turn for turn in range(6)]
        for before, after in pairwise(calls):
            assert after.prompt.token_ids()[: before.prompt.num_tokens + 8] == [
                *before.prompt.token_ids(),
                *before.answer,
            ]


def test_sessions_of_an_agent_type_share_system_prompt_and_tools():
    first = [calls[0].prompt for calls in sessions(PLAIN).values()]
    assert {common_tokens(first[0], other) for other in first[1:]} == {50}


def test_tenants_share_nothing():
    first = [calls[0].prompt for calls in sessions(replace(PLAIN, num_tenants=3, num_sessions=20)).values()]
    assert {common_tokens(first[0], other) for other in first[1:]} == {0, 50}


def test_stripped_reasoning_is_not_in_later_prompts():
    before, after = next(iter(sessions(replace(PLAIN, reasoning_share=0.5)).values()))[:2]
    size = before.prompt.num_tokens
    assert after.prompt.token_ids()[size : size + 4] == list(before.answer[4:])


def test_a_rewrite_leaves_system_prompt_and_tools():
    calls = next(iter(sessions(replace(PLAIN, rewrite_share=1.0)).values()))
    assert [common_tokens(a.prompt, b.prompt) for a, b in pairwise(calls)] == [50] * 5


def test_a_late_edit_goes_back_so_far_before_the_end_of_the_last_prompt():
    edited = replace(PLAIN, late_edit_share=1.0, late_edit_tokens=always(4))
    before, after = next(iter(sessions(edited).values()))[:2]
    assert common_tokens(before.prompt, after.prompt) == before.prompt.num_tokens - 4


def test_a_prompt_that_grows_too_long_becomes_system_prompt_tools_and_summary():
    compacted = replace(PLAIN, compaction_tokens=90, summary_tokens=always(7))
    calls = next(iter(sessions(compacted).values()))
    assert [call.prompt.num_tokens for call in calls] == [60, 73, 86, 57, 70, 83]
    assert common_tokens(calls[2].prompt, calls[3].prompt) == 50


def test_a_session_resumed_beyond_the_limit_is_not_compacted():
    resumed = Resumed(1.0, first_tokens=always(100), turns=always(3))
    compacted = replace(PLAIN, compaction_tokens=90, summary_tokens=always(7), resumed=resumed)
    calls = next(iter(sessions(compacted).values()))
    assert [call.prompt.num_tokens for call in calls] == [100, 113, 126]


def test_tasks_come_again_where_few_are_new():
    found = sessions(replace(PLAIN, new_task_share=0.1, num_sessions=30))
    openings = {tuple(calls[0].prompt.token_ids()) for calls in found.values()}
    assert 1 <= len(openings) <= 10


def test_sub_agents_begin_after_the_call_that_sent_them_and_are_waited_for():
    found = sessions(replace(PLAIN, sub_agents=CHILDREN, num_sessions=1))
    parent = found["session-0"]
    assert [call.waits_for for call in parent[:3]] == [
        (),
        ("session-0/0", "session-0/1"),
        ("session-0/2", "session-0/3"),
    ]
    begins = found["session-0/2"][0]
    assert (begins.parent, begins.parent_turn, begins.arrival_s, begins.think_s) == ("session-0", 1, None, 0.0)
    assert found["session-0/2"][1].parent is None


def test_siblings_share_their_stem_and_nothing_with_the_parent():
    found = sessions(replace(PLAIN, sub_agents=CHILDREN, num_sessions=1))
    one, other, parent = (found[name][0].prompt for name in ("session-0/0", "session-0/3", "session-0"))
    assert (common_tokens(one, other), common_tokens(one, parent)) == (15, 0)


def test_all_messages_of_a_prompt_end_at_its_boundaries():
    calls = next(iter(sessions(PLAIN).values()))
    assert calls[0].message_boundaries == (20, 50, 60)
    assert calls[1].message_boundaries == (20, 50, 60, 68, 73)


def test_sessions_arrive_as_often_as_asked_and_later_calls_wait_for_the_user():
    found = sessions(replace(PLAIN, sessions_per_hour=3600, num_sessions=400))
    arrivals = [calls[0].arrival_s for calls in found.values()]
    assert arrivals == sorted(arrivals)
    # 400 exponential gaps of 1 s: the standard error of their sum is 20 s.
    assert arrivals[-1] == pytest.approx(400, abs=80)
    assert all(call.arrival_s is None and call.think_s > 0 for calls in found.values() for call in calls[1:])


@pytest.mark.parametrize("block_tokens", [None, 16], ids=["tokens", "blocks"])
def test_the_same_seed_gives_the_same_calls_and_more_sessions_leave_them(block_tokens):
    settings = preset("coding-agent", num_sessions=3, block_tokens=block_tokens, turns=LogNormal(3, 6), resumed=None)
    calls = list(generate(settings))
    assert list(generate(settings)) == calls
    assert list(generate(replace(settings, num_sessions=5)))[: len(calls)] == calls
    assert list(generate(replace(settings, seed=1))) != calls


def test_tokens_and_blocks_are_two_views_of_one_workload():
    tokens, blocks = (list(generate(replace(PLAIN, block_tokens=size, rewrite_share=0.3))) for size in (None, 8))
    assert [call.prompt.num_tokens for call in tokens] == [call.prompt.num_tokens for call in blocks]
    assert common_tokens(blocks[0].prompt, blocks[-1].prompt) == 48


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rewrite_share": 1.5}, "rewrite_share is 1.5, must be from 0 to 1"),
        ({"num_tenants": 0}, "num_tenants is 0, must be at least 1"),
        ({"tool_share": 0.5}, "tool_share is 0.5 and tool_gap_s None"),
        ({"compaction_tokens": 90}, "compaction_tokens is 90 and summary_tokens None"),
        ({"block_tokens": 0}, "block_tokens is 0, must be from 1 to 8,192, or None"),
        ({"vocabulary_size": 1}, "vocabulary_size is 1"),
        ({"sessions_per_hour": 0}, "sessions_per_hour is 0"),
    ],
)
def test_settings_that_make_no_workload_are_refused(changes, named):
    with pytest.raises(ConfigError, match=named):
        replace(PLAIN, **changes)
