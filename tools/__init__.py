"""Command lines and benchmarks."""
