"""Measurements behind docs/benchmarks.md: one script per claim, `python -m benchmarks.NAME`."""
