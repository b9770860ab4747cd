"""TensorRT, and in `rtx` TensorRT-RTX: one path builds and runs the engines of both."""

from octavo.backends.tensorrt.backend import TensorRtBackend
from octavo.backends.tensorrt.flavour import TENSORRT

BACKEND = TensorRtBackend(TENSORRT)

__all__ = ["BACKEND", "TensorRtBackend"]
