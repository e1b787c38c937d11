"""What the fields of a model's config may hold: one table for all architectures, checked before any value is used."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_engine.errors import ConfigError


@dataclass(frozen=True)
class Rule:
    """What a value must be, in words and as a test."""

    wanted: str
    holds: Callable[[Any], bool]

    def or_null(self) -> Rule:
        """The same, or nothing."""
        return Rule(f"{self.wanted}, or null", lambda value: value is None or self.holds(value))

    def or_text(self, text: str) -> Rule:
        """The same, or one certain text."""
        return Rule(f"{self.wanted}, or {text!r}", lambda value: value == text or self.holds(value))

    def listed(self) -> Rule:
        """A list of such values."""
        return Rule(f"a list, each entry {self.wanted}", lambda value: is_list(value) and all(map(self.holds, value)))

    def listed_of(self, count: int) -> Rule:
        """A list of so many such values."""
        many = self.listed()
        return Rule(f"a list of {count}, each {self.wanted}", lambda value: many.holds(value) and len(value) == count)

    def or_listed(self) -> Rule:
        """One such value or a list of them."""
        many = self.listed()
        return Rule(f"{self.wanted}, or a list of such", lambda value: self.holds(value) or many.holds(value))


LARGEST = 2**53
"""Whole numbers beyond this are no sizes of anything, and don't fit a float."""


def is_whole(value: object) -> bool:
    """Whether a value is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_number(value: object) -> bool:
    """Whether a value is a finite number."""
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def is_list(value: object) -> bool:
    """Whether a value is a list; a text is none."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def is_limit(value: object) -> bool:
    """Whether a value is a number, maybe infinity, which transformers writes as an object: JSON has no word for it."""
    if isinstance(value, Mapping):
        return value.get("__float__") in ("Infinity", "-Infinity")
    return is_number(value) or value in (math.inf, -math.inf)


COUNT = Rule("a whole number above 0", lambda value: is_whole(value) and value > 0)
INDEX = Rule("a whole number of at least 0", lambda value: is_whole(value) and value >= 0)
POSITIVE = Rule("a number above 0", lambda value: is_number(value) and value > 0)
NOT_NEGATIVE = Rule("a number of at least 0", lambda value: is_number(value) and value >= 0)
BASE = Rule("a number above 1", lambda value: is_number(value) and value > 1)
SHARE = Rule("a number above 0 and at most 1", lambda value: is_number(value) and 0 < value <= 1)
PART = Rule("a number of at least 0 and below 1", lambda value: is_number(value) and 0 <= value < 1)
FLAG = Rule("true or false", lambda value: isinstance(value, bool))
TEXT = Rule("a text", lambda value: isinstance(value, str))
FIELDS_INSIDE = Rule("an object", lambda value: isinstance(value, Mapping))
PATTERN = Rule(
    "a whole number above 0, or a list of true and false",
    lambda value: COUNT.holds(value) or (is_list(value) and len(value) > 0 and all(map(FLAG.holds, value))),
)
LIMITS = Rule(
    "a list of two numbers", lambda value: is_list(value) and len(value) == 2 and all(is_limit(end) for end in value)
)


def by_rule(*rules: tuple[Rule, str]) -> dict[str, Rule]:
    """The table that pairs of a rule and the names of its fields make."""
    return {name: rule for rule, names in rules for name in names.split()}


FIELDS = by_rule(
    (COUNT, "vocab_size hidden_size num_hidden_layers max_position_embeddings num_attention_heads"),
    (COUNT, "attn_layer_period expert_layer_period num_experts_per_tok shared_intermediate_size"),
    (COUNT, "mamba_d_state mamba_d_conv mamba_expand mamba_n_heads mamba_n_groups"),
    (
        COUNT.or_null(),
        "intermediate_size mamba_d_ssm moe_latent_size attention_head_dim attention_hidden_size",
    ),
    (COUNT.or_null(), "lru_width"),
    (COUNT, "conv1d_width attention_window_size mamba_ngroups n_mamba_heads num_mem_blocks adapter_rank"),
    (COUNT, "ssm_state_size mamba_num_heads mamba_head_dim moe_shared_expert_intermediate_size"),
    (COUNT, "state_size conv_kernel expand num_heads n_groups conv_L_cache block_multiple_of"),
    (COUNT, "linear_conv_kernel_dim full_attention_interval decoder_sparse_step shared_expert_intermediate_size"),
    (
        COUNT.or_null(),
        "num_key_value_heads head_dim sliding_window sliding_window_size original_max_position_embeddings",
    ),
    (COUNT.or_text("auto"), "mamba_dt_rank time_step_rank"),
    (COUNT.or_text("auto").or_null(), "mamba_d_head"),
    (INDEX, "num_dense_layers attn_layer_offset expert_layer_offset max_window_layers"),
    (INDEX.or_null(), "num_local_experts bos_token_id"),
    (INDEX.or_listed().or_null(), "eos_token_id"),
    (INDEX.listed().or_null(), "attn_layer_indices full_attn_idxs mlp_only_layers"),
    (PATTERN.or_null(), "sliding_window_pattern _sliding_window_pattern"),
    (NOT_NEGATIVE, "rms_norm_eps layer_norm_epsilon norm_eps mixer_rms_eps"),
    (POSITIVE, "query_pre_attn_scalar attention_multiplier embedding_multiplier residual_multiplier logits_scaling"),
    (POSITIVE, "block_ffn_dim_multiplier lm_head_multiplier key_multiplier ssm_in_multiplier ssm_out_multiplier"),
    (POSITIVE, "attention_in_multiplier attention_out_multiplier"),
    (POSITIVE.listed_of(5).or_null(), "ssm_multipliers"),
    (POSITIVE.listed_of(2).or_null(), "mlp_multipliers"),
    (COUNT.or_null(), "attention_chunk_size"),
    (COUNT, "intermediate_size_mlp interleave_moe_layer_step no_rope_layer_interval floor_scale"),
    (COUNT, "n_routed_experts n_group topk_group v_head_dim"),
    (POSITIVE, "logit_scale swiglu_alpha swiglu_limit"),
    (NOT_NEGATIVE, "layer_norm_eps attn_scale"),
    (NOT_NEGATIVE.listed().or_null(), "layer_rope_theta"),
    (POSITIVE.or_null(), "routed_scaling_factor attention_value_scale"),
    (INDEX.listed().or_null(), "moe_layers no_rope_layers"),
    (COUNT, "vocab_size_per_layer_input laurel_rank altup_num_inputs"),
    (COUNT.or_null(), "num_experts moe_intermediate_size global_head_dim num_global_key_value_heads top_k_experts"),
    (INDEX, "num_kv_shared_layers altup_active_idx"),
    (INDEX.or_null(), "hidden_size_per_layer_input"),
    (FLAG, "attention_k_eq_v enable_moe_block use_double_wide_mlp altup_correct_scale"),
    (FIELDS_INSIDE.or_null(), "per_layer_config"),
    (PART.listed().or_null(), "activation_sparsity_pattern"),
    (FLAG, "use_qk_norm attn_temperature_tuning norm_topk_prob"),
    (TEXT.listed().or_null(), "mlp_layer_types"),
    (POSITIVE.or_null(), "final_logit_softcapping attn_logit_softcapping logits_soft_cap"),
    (BASE, "rope_local_base_freq"),
    (BASE.or_null(), "rope_theta"),
    (SHARE.or_null(), "partial_rotary_factor"),
    (FLAG, "tie_word_embeddings tie_embedding attention_bias mlp_bias use_sliding_window"),
    (FLAG, "mamba_conv_bias mamba_proj_bias use_bias use_conv_bias residual_in_fp32 projectors_bias"),
    (FLAG, "mamba_rms_norm mamba_norm_before_gate add_bias_linear"),
    (FLAG, "use_expert_bias use_shared_attention_adapter use_mem_rope use_long_context"),
    (FLAG, "conv_bias use_sandwich_norm use_attention_gate block_auto_adjust_ff_dim"),
    (COUNT.or_null(), "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim"),
    (FLAG, "linear_allow_neg_eigval mla_use_nope"),
    (COUNT, "kv_lora_rank qk_rope_head_dim qk_nope_head_dim linear_head_dim linear_num_heads n_shared_experts"),
    (COUNT.or_null(), "q_lora_rank rotary_dim"),
    (POSITIVE, "full_attn_alpha_factor linear_attn_alpha_factor mlp_alpha_factor"),
    (POSITIVE, "full_attn_beta_factor linear_attn_beta_factor mlp_beta_factor"),
    (INDEX, "first_k_dense_replace"),
    (TEXT, "moe_router_activation_func"),
    (FIELDS_INSIDE.or_null(), "linear_attn_config"),
    (
        Rule("true, false or a text", lambda value: isinstance(value, bool | str)).or_null(),
        "use_bidirectional_attention",
    ),
    (TEXT, "model_type mlp_hidden_act hidden_mamba_act"),
    (TEXT.or_null(), "hidden_act hidden_activation position_embedding_type hybrid_override_pattern"),
    (TEXT.listed().or_null(), "layer_types layers_block_type block_types"),
    (LIMITS.or_null(), "time_step_limit"),
    (FIELDS_INSIDE.or_null(), "rope_parameters rope_scaling"),
)
"""Every field of a config that any architecture reads."""

ROPE_FIELDS = by_rule(
    (BASE.or_null(), "rope_theta"),
    (TEXT.or_null(), "rope_type type"),
    (POSITIVE.or_null(), "factor low_freq_factor high_freq_factor beta_fast beta_slow attention_factor"),
    (NOT_NEGATIVE.or_null(), "mscale mscale_all_dim"),
    (COUNT.or_null(), "original_max_position_embeddings"),
    (SHARE.or_null(), "partial_rotary_factor"),
    (FLAG, "truncate"),
    (POSITIVE.listed(), "divisors"),
    (POSITIVE.listed().or_null(), "short_factor long_factor"),
    (FIELDS_INSIDE.or_null(), "full_attention sliding_attention chunked_attention"),
)
"""Every field inside `rope_parameters` and `rope_scaling` that is read."""


def check_fields(values: Mapping[str, Any], rules: Mapping[str, Rule] = FIELDS, *, where: str = "config") -> None:
    """Raise ConfigError, with its name, for the first field that doesn't hold what it must; unknown ones are let be.

    where: what the values stand in, for the message.
    """
    for name, value in values.items():
        if name in rules and not rules[name].holds(value):
            found = reprlib.repr(value)
            raise ConfigError(f"the model's {where} has {name} = {found}, must be {rules[name].wanted}")


def check_field(values: Mapping[str, Any], name: str, rule: Rule) -> None:
    """Raise ConfigError unless one field is there and holds what it must here, which may be more than always."""
    check_fields({name: values.get(name)}, {name: rule})
