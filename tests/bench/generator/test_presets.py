"""Presets come as near to what was published as docs/WORKLOADS.md says.

Published: the figures of the traces' description. A tolerance is relative, and above what two seeds differ by; where
sessions of very different lengths weigh most (the long prompts), that is much.
"""

from functools import cache

import pytest

from hybrid_engine.bench.generator.measurement import measure
from hybrid_engine.bench.generator.presets import PRESETS, preset
from hybrid_engine.bench.generator.sessions import generate
from hybrid_engine.errors import ConfigError

NUM_SESSIONS = {"coding-agent": 533, "tool-chat": 200, "few-shot": 500, "chat": 4_000}
PUBLISHED = [
    ("coding-agent", "diverged_share", 0.028, 0.15),
    ("coding-agent", "dropped_tokens.p50", 51_000, 0.2),
    ("coding-agent", "new_tokens.p50", 713, 0.12),
    ("coding-agent", "new_tokens.p90", 4_206, 0.12),
    ("coding-agent", "think_s.p50", 10, 0.2),
    ("coding-agent", "think_s.p90", 167, 0.25),
    ("coding-agent", "prompt_tokens.p50", 104_000, 0.18),
    ("coding-agent", "prompt_tokens.p90", 234_000, 0.2),
    ("coding-agent", "reuse", 0.963, 0.01),
    ("tool-chat", "reuse", 0.951, 0.02),
    ("few-shot", "reuse", 0.953, 0.02),
    ("few-shot", "reuse_within_sessions", 0.703, 0.04),
    ("chat", "reuse", 0.374, 0.12),
]


@cache
def statistics(name: str):
    return measure(generate(preset(name, num_sessions=NUM_SESSIONS[name])))


@pytest.mark.parametrize(("name", "figure", "published", "tolerance"), PUBLISHED)
def test_a_preset_is_like_what_was_published(name, figure, published, tolerance):
    found = statistics(name)
    for part in figure.split("."):
        found = getattr(found, part)
    assert found == pytest.approx(published, rel=tolerance)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_sessions_of_its_own_kind(name):
    calls = list(generate(preset(name, num_sessions=5)))
    assert {call.session.partition("/")[0] for call in calls} == {f"session-{index}" for index in range(5)}
    assert (calls[0].answer is None) == (PRESETS[name].block_tokens is not None)


def test_an_orchestrator_sends_out_sub_agents_for_several_tenants():
    found = list(generate(preset("orchestrator", num_sessions=5)))
    assert any(call.parent for call in found)
    assert any(call.waits_for for call in found)


def test_a_preset_takes_changes():
    assert preset("chat", seed=7, num_sessions=3).seed == 7


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("chess", {}, "the workload is 'chess', must be one of coding-agent, "),
        ("chat", {"speed": 1}, "speed is no setting of a workload"),
    ],
)
def test_what_is_no_preset_is_refused(name, changes, named):
    with pytest.raises(ConfigError, match=named):
        preset(name, **changes)
