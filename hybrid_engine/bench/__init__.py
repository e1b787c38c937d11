"""Benchmarks that anybody can repeat: `hybrid-engine bench scheduler|kernels|engine|gpu|all|replay`."""
