"""The graphs of compiled drafters, as torch modules. They import torch: only the compiler does."""
