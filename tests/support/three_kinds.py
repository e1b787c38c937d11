"""A tiny model of three kinds of memory, its weights random, and its forward in plain torch: float64, by token."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

FULL, SLIDING, MAMBA = "full_attention", "sliding_attention", "mamba2"
CONFIG = {
    "model_type": "three_kinds",
    "dtype": "float32",
    "vocab_size": 259,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, MAMBA, FULL, MAMBA, SLIDING, FULL],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 20,
    "max_position_embeddings": 512,
    "rope_theta": 50.0,
    "rms_norm_eps": 1e-3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_d_conv": 3,
}
WIDTH, INNER, MLP, VOCAB = 48, 96, 56, 259
HEADS, KV_HEADS, HEAD_SIZE, WINDOW = 4, 2, 12, 20
SSM_HEADS, GROUPS, STATES, CONV = 8, 2, 6, 3
CONVOLVED = INNER + 2 * GROUPS * STATES
MLP_SHAPES = {"mlp.gate_proj": (MLP, WIDTH), "mlp.up_proj": (MLP, WIDTH), "mlp.down_proj": (WIDTH, MLP)}
ATTENTION_SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD_SIZE, WIDTH),
    "self_attn.k_proj": (KV_HEADS * HEAD_SIZE, WIDTH),
    "self_attn.v_proj": (KV_HEADS * HEAD_SIZE, WIDTH),
    "self_attn.o_proj": (WIDTH, HEADS * HEAD_SIZE),
}
MAMBA_SHAPES = {
    "mamba.in_proj": (INNER + CONVOLVED + SSM_HEADS, WIDTH),
    "mamba.conv1d": (CONVOLVED, 1, CONV),
    "mamba.norm": (INNER,),
    "mamba.out_proj": (WIDTH, INNER),
}


def random_weights(seed: int = 0) -> dict[str, Tensor]:
    """Draw every weight; norms are around 1, and states fade over some to some dozens of tokens."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 0.2) -> Tensor:
        return torch.randn(shape, generator=draw) * scale

    weights = {"model.embed_tokens.weight": normal(VOCAB, WIDTH, scale=1.0), "lm_head.weight": normal(VOCAB, WIDTH)}
    weights["model.norm.weight"] = 1 + normal(WIDTH)
    for index, kind in enumerate(CONFIG["layer_types"]):
        layer = f"model.layers.{index}"
        shapes = MLP_SHAPES | {"input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,)}
        shapes |= MAMBA_SHAPES if kind == MAMBA else ATTENTION_SHAPES
        for name, shape in shapes.items():
            weights[f"{layer}.{name}.weight"] = normal(*shape) + (1 if len(shape) == 1 else 0)
        if kind == MAMBA:
            weights[f"{layer}.mamba.conv1d.bias"] = normal(CONVOLVED)
            weights[f"{layer}.mamba.A_log"] = normal(SSM_HEADS, scale=0.5)
            weights[f"{layer}.mamba.D"] = 1 + normal(SSM_HEADS)
            weights[f"{layer}.mamba.dt_bias"] = normal(SSM_HEADS, scale=1.0) - 2
    return weights


def save(folder: Path) -> dict[str, Tensor]:
    """Write config.json and the weights to a folder; returns the weights."""
    weights = random_weights()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return weights


def logits(weights: dict[str, Tensor], token_ids: list[int]) -> Tensor:
    """Score the vocabulary after each token: float64 [tokens, vocabulary]."""
    weights = {name: tensor.double() for name, tensor in weights.items()}
    x = weights["model.embed_tokens.weight"][token_ids]
    for index, kind in enumerate(CONFIG["layer_types"]):
        own = {
            name.removeprefix(f"model.layers.{index}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"model.layers.{index}.")
        }
        normed = norm(x, own["input_layernorm.weight"])
        x = x + (mamba2(own, normed) if kind == MAMBA else attention(own, normed, WINDOW if kind == SLIDING else None))
        normed = norm(x, own["post_attention_layernorm.weight"])
        gated = F.silu(normed @ own["mlp.gate_proj.weight"].T) * (normed @ own["mlp.up_proj.weight"].T)
        x = x + gated @ own["mlp.down_proj.weight"].T
    return norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]).sqrt() * weight


def attention(own: dict[str, Tensor], x: Tensor, window: int | None) -> Tensor:
    """Softmax over all pairs of tokens, those that a query must not see masked out."""
    positions = torch.arange(len(x))
    q, k, v = (
        (x @ own[f"self_attn.{name}_proj.weight"].T).unflatten(1, (-1, HEAD_SIZE)).transpose(0, 1) for name in "qkv"
    )
    k, v = (tensor.repeat_interleave(HEADS // KV_HEADS, 0) for tensor in (rotated(k, positions), v))
    distance = positions[:, None] - positions
    is_seen = (distance >= 0) & (distance < (window or len(x)))
    scores = (rotated(q, positions) @ k.transpose(1, 2) / HEAD_SIZE**0.5).masked_fill(~is_seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ own["self_attn.o_proj.weight"].T


def rotated(heads: Tensor, positions: Tensor) -> Tensor:
    """Turn element i together with element i + half of each head."""
    half = HEAD_SIZE // 2
    angles = positions[:, None] * CONFIG["rope_theta"] ** -(torch.arange(half).double() / half)
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def mamba2(own: dict[str, Tensor], x: Tensor) -> Tensor:
    """The convolution and the recurrence one token after the other, the state a plain variable."""
    out, state = [], torch.zeros(SSM_HEADS, INNER // SSM_HEADS, STATES, dtype=torch.float64)
    inputs = torch.zeros(CONV, CONVOLVED, dtype=torch.float64)
    A = -own["mamba.A_log"].exp()
    for token in x @ own["mamba.in_proj.weight"].T:
        gate, convolved, dt = token.split([INNER, CONVOLVED, SSM_HEADS])
        inputs = torch.cat([inputs[1:], convolved[None]])
        mixed = F.silu((inputs.T * own["mamba.conv1d.weight"][:, 0]).sum(1) + own["mamba.conv1d.bias"])
        u, B, C = mixed.split([INNER, GROUPS * STATES, GROUPS * STATES])
        u = u.view(SSM_HEADS, -1)
        B, C = (part.view(GROUPS, STATES).repeat_interleave(SSM_HEADS // GROUPS, 0) for part in (B, C))
        dt = F.softplus(dt + own["mamba.dt_bias"])
        state = (dt * A).exp()[:, None, None] * state + (dt[:, None] * u)[:, :, None] * B[:, None]
        y = (state * C[:, None]).sum(2) + own["mamba.D"][:, None] * u
        gated = (y.flatten() * F.silu(gate)).view(GROUPS, -1)
        out.append(norm(gated, own["mamba.norm.weight"].view(GROUPS, -1)).flatten())
    return torch.stack(out) @ own["mamba.out_proj.weight"].T
