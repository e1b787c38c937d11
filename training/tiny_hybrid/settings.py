"""The sizes of the model and the recipe of its training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelSettings:
    """The sizes of a Jamba. The names are those of transformers' JambaConfig."""

    vocab_size: int = 2048
    hidden_size: int = 128
    intermediate_size: int = 192
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    attn_layer_period: int = 2
    attn_layer_offset: int = 1
    expert_layer_period: int = 2
    expert_layer_offset: int = 0
    num_experts: int = 4
    num_experts_per_tok: int = 2
    mamba_d_state: int = 8
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_dt_rank: int = 8
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True

    @property
    def inner_size(self) -> int:
        """Channels of a recurrent layer."""
        return self.mamba_expand * self.hidden_size

    def is_attention(self, layer: int) -> bool:
        """Whether a layer is attention; the others are recurrent."""
        return layer % self.attn_layer_period == self.attn_layer_offset

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's MLP is made of experts."""
        return layer % self.expert_layer_period == self.expert_layer_offset


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum."""

    length: int
    """Tokens of a sequence."""
    num_rows: int
    """Sequences of a step."""
    steps: int
    shares: dict[str, float]
    """How often each task comes."""

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return self.num_rows * self.length


DENSE = {"pairs": 0.4, "copy": 0.25, "recall": 0.25, "english": 0.1}
"""To begin with: what teaches to look back is most of what counts."""
MIXED = {"pairs": 0.1, "copy": 0.1, "recall": 0.6, "english": 0.2}


@dataclass(frozen=True)
class Recipe:
    """All that decides what a training run computes; a run is resumed under the same one only."""

    model: ModelSettings = ModelSettings()
    stages: tuple[Stage, ...] = (
        Stage(64, 32, 390, DENSE),
        Stage(128, 16, 360, DENSE),
        Stage(256, 8, 350, MIXED),
        Stage(512, 4, 400, MIXED),
        Stage(1024, 2, 350, MIXED),
        Stage(2048, 1, 500, MIXED),
    )
    matrix_rate: float = 0.02
    """Peak learning rate of Muon, which trains the matrices."""
    other_rate: float = 0.004
    """Peak learning rate of AdamW, which trains all else."""
    warmup_steps: int = 100
    final_rate: float = 0.05
    """The share of the peak rates that is left at the end."""
    decay_from: float = 0.3
    """The share of the steps after which the rates fall, linearly."""
    weight_decay: float = 0.01
    balance: float = 0.01
    """Weight of the loss that keeps the experts equally busy."""
    seed: int = 1

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return sum(stage.steps for stage in self.stages)

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole run."""
        return sum(stage.steps * stage.step_tokens for stage in self.stages)

    def stage_at(self, step: int) -> Stage:
        """The stage that a step belongs to."""
        for stage in self.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        raise IndexError(f"the recipe has {self.num_steps} steps")

    def rate_at(self, step: int) -> float:
        """The share of the peak learning rates in a step: up, level, down."""
        down_from = self.decay_from * self.num_steps
        down = (self.num_steps - step) / (self.num_steps - down_from)
        return min((step + 1) / self.warmup_steps, 1.0, self.final_rate + (1 - self.final_rate) * down)


def jamba_config(model: ModelSettings) -> dict[str, Any]:
    """The config.json of a model."""
    names = ModelSettings.__dataclass_fields__
    return {
        "architectures": ["JambaForCausalLM"],
        "model_type": "jamba",
        **{name: getattr(model, name) for name in names},
        "hidden_act": "silu",
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "max_position_embeddings": 4096,
        "use_mamba_kernels": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        # The weights are rounded to bfloat16 to be small; they are meant to be computed with in float32.
        "dtype": "float32",
    }
