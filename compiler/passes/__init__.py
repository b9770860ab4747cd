"""Graph passes: one rewrite each, with a record of what matched and what was left alone."""

from octavo.compiler.passes.pipeline import PassOptions, run_passes, run_quantization

__all__ = ["PassOptions", "run_passes", "run_quantization"]
