"""What engines of PyTorch on CUDA share: attention by our kernel, caches on the device."""
