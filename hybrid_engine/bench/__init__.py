"""Benchmarks that anybody can repeat: `python -m hybrid_engine.bench scheduler|kernels|engine|all`."""
