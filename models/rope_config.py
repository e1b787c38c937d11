"""From a config's rope fields, in the old and the new way of writing them, to how layers turn queries and keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybrid_engine.errors import ConfigError
from hybrid_engine.models.base import FULL, SLIDING
from hybrid_engine.models.fields import ROPE_FIELDS, check_fields
from hybrid_engine.models.layers.rope import LONGROPE, NO_ROPE, PROPORTIONAL, SCALINGS, Rope, yarn_magnitude


def rope_of(values: Mapping[str, Any], kind: str, *, head_size: int) -> Rope:
    """How the layers of a kind turn their queries and keys; not at all where rope_theta is null.

    Raises ConfigError for a scaling that isn't known here.
    """
    fields = rope_fields(values, kind)
    if fields["rope_theta"] is None:
        return NO_ROPE
    scaling = fields.get("rope_type") or fields.get("type") or "default"
    if scaling not in SCALINGS:
        raise ConfigError(f"rope scaling is {scaling!r}, must be one of {', '.join(SCALINGS)}")
    share = fields.get("partial_rotary_factor", values.get("partial_rotary_factor")) or 1.0
    num_turning = int(head_size * share)
    if scaling == PROPORTIONAL:
        size, factor = num_turning // 2 * 2, float(fields.get("factor") or 1.0)
        return Rope(float(fields["rope_theta"]), head_size, scaling, factor, num_turning=size)
    if num_turning % 2:
        raise ConfigError(f"{num_turning} of a head's {head_size} elements are to turn, must be an even number")
    rope = Rope(theta=float(fields["rope_theta"]), rotary_size=num_turning, scaling=scaling)
    if scaling == LONGROPE:
        return with_longrope(rope, fields, values)
    return with_scaling(rope, fields, values) if scaling != "default" else rope


def rope_fields(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The rope fields that hold for a kind of layer, from either schema, with a rope_theta."""
    new = values.get("rope_parameters")
    check_fields(new or {}, ROPE_FIELDS, where="rope_parameters")
    if new and kind in new:  # keyed by kind; null there leaves the defaults
        fields, where = dict(new[kind] or {}), f"rope_parameters of {kind}"
    elif new and SLIDING not in new and FULL not in new:
        fields, where = dict(new), "rope_parameters"
    else:
        fields, where = {} if is_local(values, kind) else dict(values.get("rope_scaling") or {}), "rope_scaling"
    check_fields(fields, ROPE_FIELDS, where=where)
    theta_key = "rope_local_base_freq" if is_local(values, kind) else "rope_theta"
    if fields.get("rope_theta") is None:
        fields["rope_theta"] = values[theta_key]
    return fields


def is_local(values: Mapping[str, Any], kind: str) -> bool:
    """Whether the layers of this kind have a base of their own (Gemma 3) and no scaling."""
    return kind == SLIDING and "rope_local_base_freq" in values


def with_scaling(rope: Rope, fields: Mapping[str, Any], values: Mapping[str, Any]) -> Rope:
    """A rope with the fields of its scaling."""
    original = (
        values.get("original_max_position_embeddings")
        or fields.get("original_max_position_embeddings")
        or values["max_position_embeddings"]
    )
    factor = fields.get("factor") or values["max_position_embeddings"] / original
    names = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
    given: dict[str, Any] = {name: float(fields[name]) for name in names if fields.get(name) is not None}
    scaled = Rope(
        theta=rope.theta,
        rotary_size=rope.rotary_size,
        scaling=rope.scaling,
        factor=float(factor),
        original_max_position_embeddings=int(original),
        is_truncated=fields.get("truncate", True),
        magnitude=magnitude_of(fields, factor) if rope.scaling == "yarn" else 1.0,
        divisors=tuple(fields.get("divisors", ())),
        **given,
    )
    if scaled.scaling == "llama3" and scaled.low_freq_factor >= scaled.high_freq_factor:
        low, high = scaled.low_freq_factor, scaled.high_freq_factor
        raise ConfigError(f"low_freq_factor is {low:g}, must be below high_freq_factor ({high:g})")
    if scaled.scaling == "divisors" and 2 * len(scaled.divisors) != scaled.rotary_size:
        num_frequencies = scaled.rotary_size // 2
        raise ConfigError(
            f"there are {len(scaled.divisors)} rope divisors, must be one a frequency ({num_frequencies})"
        )
    return scaled


def with_longrope(rope: Rope, fields: Mapping[str, Any], values: Mapping[str, Any]) -> Rope:
    """A rope whose frequencies have divisors of their own (LongRoPE, https://arxiv.org/abs/2402.13753).

    A checkpoint has two sets, for texts within the original context and for longer ones. Which one holds is decided
    here, by the length that the model may reach: keys of one text must all be turned alike, and be found by others.
    """
    longest = values["max_position_embeddings"]
    original = fields.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
    original = original or longest
    which = "long_factor" if longest > original else "short_factor"
    divisors = tuple(fields.get(which) or ())
    if 2 * len(divisors) != rope.rotary_size:
        raise ConfigError(
            f"{which} has {len(divisors)} entries, must be one a frequency ({rope.rotary_size // 2} of them)"
        )
    factor = fields.get("factor") or longest / original
    magnitude = fields.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return replace(
        rope,
        divisors=divisors,
        factor=float(factor),
        magnitude=float(magnitude),
        original_max_position_embeddings=original,
    )


def magnitude_of(fields: Mapping[str, Any], factor: float) -> float:
    """What YaRN multiplies cosines and sines with."""
    if fields.get("attention_factor") is not None:
        return fields["attention_factor"]
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        return yarn_magnitude(factor, fields["mscale"]) / yarn_magnitude(factor, fields["mscale_all_dim"])
    return yarn_magnitude(factor)
