"""A real model to try the engine with: Gemma 3 270M from the `demo` extra. `python -m hybrid_engine.demo` shows it."""

from hybrid_engine.demo.weights import TERMS, demo_checkpoint

__all__ = ["TERMS", "demo_checkpoint"]
