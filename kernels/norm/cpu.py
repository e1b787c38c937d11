"""RMSNorm on a CPU."""

from hybrid_engine.kernels.norm import reference

rms_norm = reference.rms_norm
add_rms_norm = reference.add_rms_norm
norm_add_norm = reference.norm_add_norm
