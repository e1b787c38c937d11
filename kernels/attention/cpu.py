"""Attention over blocks on a CPU."""

from __future__ import annotations

from hybrid_engine.kernels.attention import fallback, reference

write_kv = reference.write_kv
attention = fallback.attention
qkv_norm_rope_write = reference.qkv_norm_rope_write
