"""The families that are run here, as a table: what they keep, and how near their logits are to transformers'."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_engine.groups.spec import ENDLESS, AttentionSpec, Group, group_layers
from hybrid_engine.models.published import PUBLISHED, config_of
from hybrid_engine.models.registry import ARCHITECTURES, describe_model

PARITY_FILE = Path(__file__).with_name("parity.json")
"""By model_type: the largest difference to transformers' logits, of their deviation. tests/support/measure_parity.py
writes it."""
COLUMNS = (
    "family",
    "run by",
    "checkpoint",
    "groups (layers: what they keep)",
    "bytes a token",
    "bytes a state",
    "parity",
)
ELEMENT_BYTES, BLOCK_SIZE = 2, 16
"""Of bfloat16; tokens in a block."""
OUR_OWN = {"three_kinds"}
"""Architectures that no checkpoint is of."""


def rows() -> list[tuple[str, ...]]:
    """One for each family: those with a file of their own, then those of transformers' code that are tested here."""
    parity = json.loads(PARITY_FILE.read_text()) if PARITY_FILE.exists() else {}
    native = [_row(kind, parity) for kind in ARCHITECTURES if kind not in OUR_OWN]
    others = sorted(parity.keys() - ARCHITECTURES.keys())
    return native + [(kind, "transformers", "", "", "", "", _parity(kind, parity)) for kind in others]


def markdown() -> str:
    """The table as a page of the documentation."""
    lines = [
        "# Families",
        "",
        "Made by `hybrid-engine models --markdown`; don't edit.",
        "",
        "*Run by* us: a file in `models/`, with fused kernels. By transformers: its own code with our attention and",
        "caches, slower; any other decoder of transformers whose layers only attend runs so too, if it passes the",
        "check that is made when it is loaded. *Bytes* are those of bfloat16: of one token in all groups that keep",
        "tokens, of one state in all groups that keep states. The groups are those of the checkpoint named, or of the",
        "family's default config where none is. *Parity*: the largest difference of logits to those of transformers",
        "over 48 and over 200 tokens, in float32, of their deviation, on tiny random models with unusual periods,",
        "offsets and counts (`python tests/support/measure_parity.py`).",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
        *(f"| {' | '.join(row)} |" for row in rows()),
    ]
    return "\n".join(lines) + "\n"


def _row(kind: str, parity: Mapping[str, Any]) -> tuple[str, ...]:
    info = describe_model(config_of(kind))
    groups = group_layers(info.cache_specs(block_size=BLOCK_SIZE, element_bytes=ELEMENT_BYTES))
    tokens = sum(group.block_bytes // group.block_size for group in groups if group.block_size != ENDLESS)
    states = sum(group.block_bytes for group in groups if group.block_size == ENDLESS)
    name = PUBLISHED[kind].name if kind in PUBLISHED else ""
    kept = "; ".join(f"{len(group.layer_indices)}: {keeps(group)}" for group in groups)
    return (
        kind,
        "us",
        name,
        kept,
        f"{tokens:,}" if tokens else "",
        f"{states:,}" if states else "",
        _parity(kind, parity),
    )


def keeps(group: Group) -> str:
    """What a group keeps of a request, in a few words."""
    spec = group.spec
    if not isinstance(spec, AttentionSpec):
        return "a state"
    window, chunk = getattr(spec, "window", None), getattr(spec, "chunk", None)
    if window is not None:
        return f"last {window:,}"
    return "all" if chunk is None else f"chunk of {chunk:,}"


def _parity(kind: str, parity: Mapping[str, Any]) -> str:
    if kind not in parity:
        return "not measured"
    return f"{parity[kind]:.0e}" if parity[kind] else "0"
