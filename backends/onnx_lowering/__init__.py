"""From a captured program to ONNX, for every backend that is fed with it. Imports torch."""

from octavo.backends.onnx_lowering import (
    rules_attention,
    rules_elementwise,
    rules_fused,
    rules_indexing,
    rules_linear,
    rules_quantized,
    rules_shape,
)
from octavo.backends.onnx_lowering.lowering import (
    Layouts,
    accept_to_onnx,
    supports,
    to_onnx,
)

# The rule modules fill the table of `lowering` when they are imported.
__all__ = [
    "Layouts",
    "accept_to_onnx",
    "rules_attention",
    "rules_elementwise",
    "rules_fused",
    "rules_indexing",
    "rules_linear",
    "rules_quantized",
    "rules_shape",
    "supports",
    "to_onnx",
]
