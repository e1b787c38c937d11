"""Weights on disk: safetensors and GGUF, read lazily under Hugging Face's tensor names."""

from hybrid_engine.weights.checkpoint import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]
