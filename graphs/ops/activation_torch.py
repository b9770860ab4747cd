"""The torch references of `octavo::activate` and `octavo::activate_quantize`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from octavo.graphs.ops import torch_library
from octavo.graphs.ops.activation import ACTIVATE, ACTIVATE_QUANTIZE, Function
from octavo.graphs.ops.quantization_torch import Quantized, quantize, quantized_shapes

_FUNCTIONS: dict[Function, Callable[[Tensor], Tensor]] = {
    Function.SILU: functional.silu,
    Function.GELU: functional.gelu,
    Function.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Function.RELU: functional.relu,
    Function.RELU_SQUARED: lambda x: functional.relu(x).square(),
}


def activate(rows: Tensor, function: int, gated: int) -> Tensor:
    """f32 [M, K], of [M, K] or, if gated, of [M, 2 K]."""
    apply = _FUNCTIONS[Function(function)]
    if not gated:
        return apply(rows)
    gate, factor = rows.chunk(2, -1)
    return apply(gate) * factor


def activate_quantize(rows: Tensor, function: int, gated: int) -> Quantized:
    return quantize(activate(rows, function, gated))


def _depth(rows: Tensor, gated: int) -> int:
    return rows.shape[1] // 2 if gated else rows.shape[1]


def _activate_shape(rows: Tensor, _: int, gated: int) -> Tensor:
    return rows.new_empty(rows.shape[0], _depth(rows, gated))


def _activate_quantize_shapes(rows: Tensor, _: int, gated: int) -> Quantized:
    return quantized_shapes(rows, _depth(rows, gated))


ACTIVATE_OPERATOR = torch_library.register(ACTIVATE, activate, _activate_shape)
ACTIVATE_QUANTIZE_OPERATOR = torch_library.register(
    ACTIVATE_QUANTIZE, activate_quantize, _activate_quantize_shapes
)
