"""Measure how near our logits are to transformers', by family, and write hybrid_engine/parity.json.

    python tests/support/measure_parity.py

Takes every tiny model of the tests: tables of a name and what makes a model's class and config.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

TESTS = Path(__file__).resolve().parent.parent
TABLES = ("FAMILIES", "GENERIC", "MODELS")
LENGTHS = (48, 200)


def load(path: Path) -> ModuleType:
    """A test module by its path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny_models() -> Iterator[Callable[[], tuple[Any, Any]]]:
    """What makes each tiny model."""
    paths = sorted((TESTS / "support").glob("*_families.py")) + sorted((TESTS / "models").glob("test_*parity.py"))
    for module in map(load, paths):
        for table in TABLES:
            yield from getattr(module, table, {}).values()


def measure(make: Callable[[], tuple[Any, Any]], support: ModuleType) -> tuple[str, float]:
    """(model_type, largest difference of logits over both lengths, of their deviation)."""
    from hybrid_engine.models.registry import load_model
    from hybrid_engine.weights import open_checkpoint

    model_class, config = make()
    print(config.model_type, end=": ", flush=True)
    largest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        support.save_random(model_class, config, Path(folder))
        theirs = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        ours = load_model(open_checkpoint(folder), dtype=torch.float32)
        for length in LENGTHS:
            tokens = torch.randint(0, 99, (length,), generator=torch.Generator().manual_seed(1)).tolist()
            with torch.inference_mode():
                expected_TV = theirs(torch.tensor([tokens]), use_cache=False).logits[0].float()
            found_TV = support.PagedRun(ours, max_tokens=length).step({0: tokens})[0]
            difference = ((found_TV - expected_TV).abs().max() / expected_TV.std()).item()
            assert difference == difference, f"{config.model_type} gives NaN"
            largest = max(largest, difference)
    return config.model_type, largest


def main() -> None:
    """Measure all, write the file."""
    sys.path[:0] = [str(TESTS.parent), str(TESTS / "support")]
    support = load(TESTS / "models" / "conftest.py")
    found: dict[str, float] = {}
    for make in tiny_models():
        kind, largest = measure(make, support)
        found[kind] = max(found.get(kind, 0.0), float(f"{largest:.1e}"))
        print(f"{largest:.1e}", flush=True)
    target = TESTS.parent / "hybrid_engine" / "parity.json"
    target.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
