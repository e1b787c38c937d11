"""Names of stored things: equal content, equal name; anything else, another name."""

import pytest

from hybrid_engine.transfer_plan import BlockKey, CheckpointKey

CHECKPOINT = CheckpointKey(b"p" * 16, (1, 2), 34)


@pytest.mark.parametrize(
    "other",
    [
        CHECKPOINT._replace(parent=b"q" * 16),
        CHECKPOINT._replace(tail=(1, 3)),
        CHECKPOINT._replace(tail=(1,)),
        CHECKPOINT._replace(position=33),
        CHECKPOINT._replace(tail=(34, 1, 2)),
        BlockKey(0, b"p" * 16),
    ],
    ids=["parent", "tail", "shorter tail", "position", "numbers moved", "a block"],
)
def test_checkpoints_that_differ_in_anything_have_different_names(other):
    assert other.name != CHECKPOINT.name


def test_a_checkpoint_has_the_same_name_in_every_process():
    assert CHECKPOINT.name == "checkpoint.1feb4ae39dbcf40edb0fc18ba7a26cc4"


def test_a_block_is_named_by_its_group_and_its_hash():
    assert BlockKey(3, b"\x01" * 16).name == "3." + "01" * 16
