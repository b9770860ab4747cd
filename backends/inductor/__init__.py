"""AOTInductor: the graph compiled to machine code ahead of time, with Octavo's native kernels."""

from octavo.backends.inductor.backend import InductorBackend

BACKEND = InductorBackend()

__all__ = ["BACKEND", "InductorBackend"]
