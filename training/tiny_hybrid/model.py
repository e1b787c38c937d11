"""Jamba as transformers has it, small and trainable on any device: its weights have the same names and meaning."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.tiny_hybrid.scan import selective_scan
from training.tiny_hybrid.settings import ModelSettings


def linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    """A layer without bias."""
    return nn.Linear(num_inputs, num_outputs, bias=False)


class RmsNorm(nn.Module):
    """In float32, also where the input isn't."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        """Bring each row's mean square to 1."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Mamba(nn.Module):
    """A recurrent layer. Time steps, B and C are normed."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        inner, self.rank, self.state_size = settings.inner_size, settings.mamba_dt_rank, settings.mamba_d_state
        self.in_proj = linear(settings.hidden_size, 2 * inner)
        self.conv1d = nn.Conv1d(inner, inner, settings.mamba_d_conv, groups=inner)
        self.x_proj = linear(inner, self.rank + 2 * self.state_size)
        self.dt_proj = nn.Linear(self.rank, inner)
        self.dt_layernorm = RmsNorm(self.rank, settings.rms_norm_eps)
        self.b_layernorm = RmsNorm(self.state_size, settings.rms_norm_eps)
        self.c_layernorm = RmsNorm(self.state_size, settings.rms_norm_eps)
        self.A_log = nn.Parameter(torch.arange(1.0, self.state_size + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = linear(inner, settings.hidden_size)
        # The steps that softplus makes of the bias are spread from 0.001 to 0.1, evenly on a log scale.
        step = torch.exp(torch.rand(inner) * math.log(100) + math.log(0.001))
        with torch.no_grad():
            self.dt_proj.bias.copy_(step + torch.log(-torch.expm1(-step)))

    def forward(self, x_RTE: Tensor) -> Tensor:
        """Mix each sequence from a zero state on."""
        inputs_RTI, gate_RTI = self.in_proj(x_RTE).chunk(2, dim=-1)
        inputs_RTI = F.silu(self._convolve(inputs_RTI.float()))
        dt, B, C = self.x_proj(inputs_RTI).split([self.rank, self.state_size, self.state_size], dim=-1)
        dt_RTI = F.softplus(self.dt_proj(self.dt_layernorm(dt)).float())
        y_RTI = selective_scan(
            dt_RTI,
            dt_RTI * inputs_RTI,
            A_IN=-self.A_log.exp(),
            B_RTN=self.b_layernorm(B),
            C_RTN=self.c_layernorm(C),
        )
        return self.out_proj((y_RTI + self.D * inputs_RTI) * F.silu(gate_RTI))

    def _convolve(self, x_RTI: Tensor) -> Tensor:
        width, num_tokens = self.conv1d.kernel_size[0], x_RTI.shape[1]
        padded = F.pad(x_RTI, (0, 0, width - 1, 0))
        out_RTI = self.conv1d.bias
        assert out_RTI is not None
        for back in range(width):
            out_RTI = torch.addcmul(out_RTI, padded[:, back : back + num_tokens], self.conv1d.weight[:, 0, back])
        return out_RTI


class Attention(nn.Module):
    """Attention without positions."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        width = settings.hidden_size
        self.head_size = width // settings.num_attention_heads
        self.q_proj = linear(width, width)
        self.k_proj = linear(width, self.head_size * settings.num_key_value_heads)
        self.v_proj = linear(width, self.head_size * settings.num_key_value_heads)
        self.o_proj = linear(width, width)

    def forward(self, x_RTE: Tensor) -> Tensor:
        """Let each token look back."""
        q, k, v = (
            project(x_RTE).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.gate_proj = linear(settings.hidden_size, settings.intermediate_size)
        self.up_proj = linear(settings.hidden_size, settings.intermediate_size)
        self.down_proj = linear(settings.intermediate_size, settings.hidden_size)

    def forward(self, x_RTE: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and no loss."""
        return self.down_proj(F.silu(self.gate_proj(x_RTE)) * self.up_proj(x_RTE)), x_RTE.new_zeros(())


class Experts(nn.Module):
    """Several MLPs, of which each token goes through the few that the router likes best.

    All are computed for all tokens, in two large products: at this size that beats sorting the tokens.
    """

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.num_chosen = settings.num_experts_per_tok
        self.router = linear(settings.hidden_size, settings.num_experts)
        self.experts = nn.ModuleList(Mlp(settings) for _ in range(settings.num_experts))

    def forward(self, x_RTE: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and how unequally the experts are used (1 is equal)."""
        shares_RTX = self.router(x_RTE).float().softmax(-1)
        chosen = shares_RTX.topk(self.num_chosen, dim=-1).indices
        is_chosen_RTX = torch.zeros_like(shares_RTX).scatter(-1, chosen, 1.0)
        gate, up, down = (
            [getattr(expert, f"{name}_proj").weight for expert in self.experts] for name in ("gate", "up", "down")
        )
        num_experts = len(self.experts)
        hidden = F.silu(F.linear(x_RTE, torch.cat(gate))) * F.linear(x_RTE, torch.cat(up))
        weighted = hidden.unflatten(-1, (num_experts, -1)) * (shares_RTX * is_chosen_RTX)[..., None]
        out_RTE = F.linear(weighted.flatten(-2), torch.cat(down, dim=1))
        load = is_chosen_RTX.mean((0, 1)) / self.num_chosen
        return out_RTE, num_experts * (load * shares_RTX.mean((0, 1))).sum()


class Layer(nn.Module):
    """A mixer and an MLP."""

    def __init__(self, settings: ModelSettings, index: int) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(settings.hidden_size, settings.rms_norm_eps)
        if settings.is_attention(index):
            self.self_attn = Attention(settings)
        else:
            self.mamba = Mamba(settings)
        self.pre_ff_layernorm = RmsNorm(settings.hidden_size, settings.rms_norm_eps)
        self.feed_forward = Experts(settings) if settings.has_experts(index) else Mlp(settings)

    def forward(self, x_RTE: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream after this layer, and the experts' loss."""
        mixer = self.self_attn if hasattr(self, "self_attn") else self.mamba
        x_RTE = x_RTE + mixer(self.input_layernorm(x_RTE))
        out_RTE, balance = self.feed_forward(self.pre_ff_layernorm(x_RTE))
        return x_RTE + out_RTE, balance


class Body(nn.Module):
    """All but the output layer; a module of its own for the sake of the weights' names."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(settings.vocab_size, settings.hidden_size)
        self.layers = nn.ModuleList(Layer(settings, index) for index in range(settings.num_hidden_layers))
        self.final_layernorm = RmsNorm(settings.hidden_size, settings.rms_norm_eps)


class TinyJamba(nn.Module):
    """A Jamba for training."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.settings = settings
        self.model = Body(settings)
        self.lm_head = linear(settings.hidden_size, settings.vocab_size)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.02)
        for layer in self.model.layers:
            for name, module in layer.named_modules():
                if name.endswith(("out_proj", "o_proj", "down_proj")):
                    module.weight.data /= math.sqrt(2 * settings.num_hidden_layers)
        if settings.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens_RT: Tensor) -> tuple[Tensor, Tensor]:
        """The logits after each token, and the experts' loss."""
        x_RTE = self.model.embed_tokens(tokens_RT)
        balance = x_RTE.new_zeros(())
        for layer in self.model.layers:
            x_RTE, loss = layer(x_RTE)
            balance = balance + loss
        return self.lm_head(self.model.final_layernorm(x_RTE)), balance
