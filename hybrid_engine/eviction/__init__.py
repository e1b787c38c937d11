"""Policies: which recorded checkpoint goes when memory is short. See docs/EVICTION.md."""
