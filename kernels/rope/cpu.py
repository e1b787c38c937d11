from hybrid_engine.kernels.rope.reference import apply_rope

__all__ = ["apply_rope"]
