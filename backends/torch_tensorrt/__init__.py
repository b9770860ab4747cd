"""Torch-TensorRT: the exported program in TensorRT engines, attention left to PyTorch."""

from octavo.backends.torch_tensorrt.backend import TorchTensorRTBackend

BACKEND = TorchTensorRTBackend()

__all__ = ["BACKEND", "TorchTensorRTBackend"]
