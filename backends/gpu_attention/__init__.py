"""Paged attention for NVIDIA GPUs, written in Triton: see README.md. Importing this is light."""

from octavo.backends.gpu_attention.shape import AttentionShape

__all__ = ["AttentionShape"]
