"""The oracle: the captured graph run by eager PyTorch."""

from octavo.backends.torch.backend import TorchBackend

BACKEND = TorchBackend()

__all__ = ["BACKEND", "TorchBackend"]
