"""The compiler: a Hugging Face checkpoint becomes an engine bundle."""

from octavo.compiler.build import BuildResult, build_engine, cached_engine
from octavo.compiler.config import BuildConfig

__all__ = ["BuildConfig", "BuildResult", "build_engine", "cached_engine"]
