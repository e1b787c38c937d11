import numpy as np
import pytest

from hybrid_engine.runner.draws import pick, uniform


def test_the_same_seed_and_position_give_the_same_number_in_every_release():
    assert uniform(0, 0) == 0.3879292288755056
    assert uniform(2**63 - 1, 12345) == 0.046947086864023935


def test_neighbouring_seeds_and_positions_give_unrelated_numbers():
    drawn = np.array([[uniform(seed, position) for position in range(100)] for seed in range(100)])
    assert len(np.unique(drawn)) == drawn.size
    assert ((drawn >= 0) & (drawn < 1)).all()
    counts = np.histogram(drawn, bins=50, range=(0, 1))[0]
    assert ((counts - 200) ** 2 / 200).sum() < 100  # 49 degrees of freedom
    assert abs(np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]) < 0.04
    assert abs(np.corrcoef(drawn[:, :-1].ravel(), drawn[:, 1:].ravel())[0, 1]) < 0.04


@pytest.mark.parametrize(("target", "index"), [(0.0, 1), (0.1, 1), (0.25, 3), (0.74, 3), (0.75, 4), (1.0, 4), (2.0, 4)])
def test_a_weight_of_zero_is_never_picked(target, index):
    assert pick(np.array([0, 0.25, 0, 0.5, 0.25, 0]), target) == index
