"""Workloads like those that were published. docs/WORKLOADS.md says where each value is from, and how near they come."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from hybrid_engine.bench.generator.distributions import LogNormal
from hybrid_engine.bench.generator.settings import Resumed, SubAgents, WorkloadSettings
from hybrid_engine.errors import ConfigError

CODING_AGENT = WorkloadSettings(
    system_tokens=LogNormal(2_780, 3_430),
    tools_tokens=LogNormal(12_440, 12_970),
    opening_tokens=LogNormal(3_800, 8_200),
    turns=LogNormal(68, 189, most=400),
    answer_tokens=LogNormal(220, 908),
    result_tokens=LogNormal(402, 3_087),
    reasoning_share=0.3,
    tool_share=0.868,
    tool_gap_s=LogNormal(9, 70),
    user_think_s=LogNormal(126, 1_618),
    resumed=Resumed(0.45, LogNormal(114_000, 380_000, least=40_000, most=500_000), LogNormal(26, 107, most=240)),
    late_edit_share=0.0110,
    late_edit_tokens=LogNormal(181, 620),
    rewrite_share=0.0131,
    compaction_tokens=165_000,
    large_context_share=0.2,
    summary_tokens=LogNormal(22_000, 80_000, most=120_000),
    sub_agents=SubAgents(
        share=0.0006,
        children=LogNormal(3, 7),
        stem_tokens=LogNormal(9_900, 10_400),
        task_tokens=LogNormal(250, 1_900),
        turns=LogNormal(10.5, 17),
    ),
    num_agent_types=4,
    sessions_per_hour=6,
)
"""Sessions of a coding agent, hours long, most of whose calls return from tools."""

ORCHESTRATOR = replace(
    CODING_AGENT,
    resumed=None,
    sub_agents=SubAgents(
        share=0.1,
        children=LogNormal(3, 6),
        stem_tokens=LogNormal(9_900, 10_400),
        task_tokens=LogNormal(250, 1_900),
        turns=LogNormal(10.5, 17),
    ),
    num_agent_types=2,
    num_tenants=3,
)
"""The same agent where a tenth of the calls sends out sub-agents, for three tenants. Like no published trace."""

TOOL_CHAT = WorkloadSettings(
    system_tokens=LogNormal(1_566, 1_566),
    tools_tokens=None,
    opening_tokens=LogNormal(27, 45),
    turns=LogNormal(11, 20),
    answer_tokens=LogNormal(61, 140),
    result_tokens=LogNormal(41, 252),
    tool_share=0.5,
    tool_gap_s=LogNormal(1, 5),
    user_think_s=LogNormal(20, 90),
    sessions_per_hour=600,
    num_sessions=200,
    block_tokens=None,
)
"""Customers of a service desk: one policy for all, short sessions, half of the calls return from tools."""

FEW_SHOT = WorkloadSettings(
    system_tokens=LogNormal(60, 60),
    tools_tokens=LogNormal(750, 850),
    opening_tokens=LogNormal(60, 500, most=750),
    turns=LogNormal(2.6, 6, most=5),
    answer_tokens=LogNormal(143, 293),
    result_tokens=LogNormal(46, 278, most=390),
    user_think_s=LogNormal(1, 5),
    new_task_share=0.225,
    num_agent_types=8,
    sessions_per_hour=3_600,
    num_sessions=500,
    block_tokens=None,
)
"""Tasks with worked examples in front, solved in a few calls; the same tasks come again."""

CHAT = WorkloadSettings(
    system_tokens=LogNormal(600, 600),
    tools_tokens=None,
    opening_tokens=LogNormal(4_660, 25_000),
    turns=LogNormal(1, 3),
    answer_tokens=LogNormal(350, 597),
    result_tokens=LogNormal(46, 5_048, most=17_000),
    user_think_s=LogNormal(110, 470),
    late_edit_share=0.15,
    late_edit_tokens=LogNormal(10_750, 21_500),
    sessions_per_hour=7_500,
    num_sessions=2_000,
    block_tokens=512,
)
"""Users of a chat service: documents and questions, most asked once."""

PRESETS = {
    "coding-agent": CODING_AGENT,
    "orchestrator": ORCHESTRATOR,
    "tool-chat": TOOL_CHAT,
    "few-shot": FEW_SHOT,
    "chat": CHAT,
}


def preset(name: str, **changes: Any) -> WorkloadSettings:
    """Return a preset, with some fields changed. Raises ConfigError for a name or field that there is not."""
    if name not in PRESETS:
        raise ConfigError(f"the workload is {name!r}, must be one of {', '.join(PRESETS)}")
    known = [field.name for field in fields(WorkloadSettings)]
    if wrong := changes.keys() - set(known):
        raise ConfigError(f"{', '.join(sorted(wrong))} is no setting of a workload, must be of {', '.join(known)}")
    return replace(PRESETS[name], **changes)
