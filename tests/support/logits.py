"""Comparing logits with those of transformers, made by one forward of the whole text."""

import torch

TOLERANCE = 1e-3
"""Of the logits' deviation: sums of some hundred float32 terms in another order, through a few layers."""


def random_tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 99, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def their_logits(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([token_ids]), use_cache=False).logits[0].float()


def check_close(logits_TV: torch.Tensor, expected_TV: torch.Tensor) -> None:
    deviation = expected_TV.std().item()
    assert deviation > 0.05
    torch.testing.assert_close(logits_TV, expected_TV, rtol=0, atol=TOLERANCE * deviation)
