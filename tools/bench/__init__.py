"""Benchmarks: scenarios in JSON files, each measured in fresh processes."""
