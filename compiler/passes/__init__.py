"""Graph passes: one rewrite each, with a record of what matched and what was left alone."""

from octavo.compiler.passes.pipeline import run_passes

__all__ = ["run_passes"]
