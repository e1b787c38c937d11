"""The recurrent ops on a CPU: C++ where it can be built, else torch."""

from __future__ import annotations

from hybrid_engine.kernels.ssm import reference

causal_conv1d = reference.causal_conv1d
mamba1_scan = reference.mamba1_scan
mamba2_scan = reference.mamba2_scan
gated_rms_norm = reference.gated_rms_norm
