"""Backends: one folder each, one protocol for all (`octavo.backends.base`)."""
