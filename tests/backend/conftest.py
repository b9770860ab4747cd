"""Fixtures of the suite that every backend passes."""

from tests.backend.tiny_engines import tiny_engines

__all__ = ["tiny_engines"]
