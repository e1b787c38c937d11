from hybrid_engine.kernels.activation.reference import act_mul

__all__ = ["act_mul"]
