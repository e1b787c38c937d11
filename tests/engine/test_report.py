import pytest

from hybrid_engine.report import _ranges, format_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"), (1 << 60, "1,048,576.0 TiB")],
)
def test_a_size_is_written_in_the_unit_that_fits(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("indices", "text"), [((5,), "5"), ((0, 1, 2, 3, 4, 6, 7, 9), "0-4, 6-7, 9")], ids=["one", "runs"]
)
def test_runs_of_layers_are_shortened(indices, text):
    assert _ranges(indices) == text
