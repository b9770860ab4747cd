"""The default backend: ONNX Runtime with Octavo's native kernels."""

from octavo.backends.onnxruntime.backend import OnnxRuntimeBackend

BACKEND = OnnxRuntimeBackend()

__all__ = ["BACKEND", "OnnxRuntimeBackend"]
