"""From a captured program to ONNX, for every backend that is fed with it. Imports torch."""

from octavo.backends.onnx_lowering.lowering import supports, to_onnx

__all__ = ["supports", "to_onnx"]
