"""Plans made by hand for a model whose answers show every wrong read."""

import pytest
import torch
from hand_plans import DigestModel, Hand, digest_groups


@pytest.fixture
def make_hand():
    """Makes further runners of a DigestModel."""
    return lambda: Hand(DigestModel(), digest_groups())


@pytest.fixture(params=[torch.nan, 1e30], ids=["nan", "1e30"])
def hand(request) -> Hand:
    """A runner of a DigestModel; what nobody may read holds each kind of poison."""
    return Hand(DigestModel(), digest_groups(), poison=request.param)
