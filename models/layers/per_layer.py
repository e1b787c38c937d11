"""Per-layer inputs of Gemma 3n and Gemma 4: beside the residual stream, each layer gets a short vector of its own."""

from __future__ import annotations

from torch import Tensor, cat, nn

from hybrid_engine.kernels.activation import act_mul
from hybrid_engine.kernels.norm import rms_norm
from hybrid_engine.models.layers.linear import Embedding, FusedLinear
from hybrid_engine.models.layers.norm import Norm


class PerLayerInputs(nn.Module):
    """Half from the token, looked up, half from its embedding, projected."""

    def __init__(self, *, vocab_size: int, hidden_size: int, num_layers: int, size: int, eps: float) -> None:
        """vocab_size: of the table of these inputs; tokens beyond it get those of token 0. size: of one vector (P)."""
        super().__init__()
        self.vocab_size, self.size, self.eps = vocab_size, size, eps
        self.projection_scale = hidden_size**-0.5
        self.table = Embedding(
            "model.embed_tokens_per_layer", vocab_size=vocab_size, hidden_size=num_layers * size, scale=size**0.5
        )
        self.projection = FusedLinear(hidden_size, {"model.per_layer_model_projection": num_layers * size})
        self.norm = Norm("model.per_layer_projection_norm", size)

    def forward(self, token_ids_T: Tensor, x_TE: Tensor) -> Tensor:
        """[T, layers, P]. x_TE: the tokens' embeddings."""
        projected_TLP = (self.projection(x_TE) * self.projection_scale).unflatten(1, (-1, self.size))
        projected_TLP = rms_norm(projected_TLP, self.norm.weight_E, eps=self.eps)
        found_TLP = self.table(token_ids_T * (token_ids_T < self.vocab_size)).unflatten(1, (-1, self.size))
        return (projected_TLP + found_TLP) * 2**-0.5


class PerLayerGate(nn.Module):
    """What a layer makes of its vector: gated by the stream, projected back to its width, normed."""

    def __init__(self, layer: str, *, hidden_size: int, size: int, activation: str, eps: float) -> None:
        """layer: the layer's name in the checkpoint."""
        super().__init__()
        self.activation, self.eps = activation, eps
        self.gate = FusedLinear(hidden_size, {f"{layer}.per_layer_input_gate": size})
        self.projection = FusedLinear(size, {f"{layer}.per_layer_projection": hidden_size})
        self.norm = Norm(f"{layer}.post_per_layer_input_norm", hidden_size)

    def forward(self, x_TE: Tensor, input_TP: Tensor) -> Tensor:
        """[T, E], to be added to the stream."""
        gated_TP = act_mul(cat([self.gate(x_TE), input_TP], 1), kind=self.activation)
        return rms_norm(self.projection(gated_TP), self.norm.weight_E, eps=self.eps)
