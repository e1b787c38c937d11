import pytest
from rich.console import Console

from hybrid_engine.models.registry import describe_model
from hybrid_engine.report import _ranges, format_bytes, layer_table


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


def test_the_layer_table_shows_what_recurrent_layers_are():
    config = {"model_type": "jamba", "num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 2}
    console = Console(width=80)
    with console.capture() as capture:
        console.print(layer_table(describe_model(config)))
    rows = [line.split() for line in capture.get().splitlines() if line.strip()[:1].isdigit()]
    assert rows == [
        ["0", "mamba", "a", "state", "-", "-", "-", "-", "none", "-"],
        ["1", "mamba", "a", "state", "-", "-", "-", "-", "none", "16"],
        ["2", "full", "all", "32", "8", "128", "-", "none", "-"],
    ]


def test_the_layer_table_shows_three_kinds_of_memory():
    config = {"model_type": "lfm3", "layer_types": ["conv", "full_attention", "sliding_attention"]}
    console = Console(width=80)
    with console.capture() as capture:
        console.print(layer_table(describe_model(config | {"num_hidden_layers": 3})))
    rows = [line.split() for line in capture.get().splitlines() if line.strip()[:1].isdigit()]
    assert rows == [
        ["0", "conv", "a", "state", "-", "-", "-", "-", "none"],
        ["1", "full", "all", "16", "4", "128", "1,000,000", "64", "of", "128"],
        ["2", "sliding", "last", "256", "16", "4", "128", "10,000", "default"],
    ]
