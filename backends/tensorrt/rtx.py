"""TensorRT-RTX: engines for consumer and workstation GPUs, which build on machines without one."""

from octavo.backends.tensorrt.backend import TensorRtBackend
from octavo.backends.tensorrt.flavour import TENSORRT_RTX

BACKEND = TensorRtBackend(TENSORRT_RTX)

__all__ = ["BACKEND"]
