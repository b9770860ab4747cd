"""Names of the files of an ONNX Runtime engine."""

from __future__ import annotations

MODEL_FILE = "model.onnx"
ACCEPT_FILE = "accept.onnx"
COPY_BLOCKS_FILE = "copy_blocks.onnx"  # of engines for CUDA


def weights_file(model: str) -> str:
    """Where the weights of the graph in the file `model` are."""
    return f"{model}.data"
