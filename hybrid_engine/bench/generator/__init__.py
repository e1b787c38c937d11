"""Workloads made by rule and seed: prefix reuse can be measured where there is no trace. See docs/WORKLOADS.md."""
