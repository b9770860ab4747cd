"""Building an ONNX graph value by value; equal constants are kept once, weights are not copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from onnx_ir import tensor_adapters

from octavo.graphs.ops.linear import PANEL
from octavo.graphs.ops.linear_torch import packed as panels_of

IR_VERSION = 10
OPSET_VERSION = 21


class GraphBuilder:
    """Collects nodes and initializers in the order of their creation."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []
        self.initializers: list[ir.Value] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self._weights: dict[tuple[int, tuple[int, ...], tuple[int, ...]], ir.Value] = {}
        self._tensors: dict[ir.Value, torch.Tensor] = {}
        self._packed: dict[tuple[ir.Value, bool], ir.Value] = {}

    def nodes_of(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        outputs: int = 1,
        *,
        domain: str = "",
        **attributes: Any,
    ) -> tuple[ir.Value, ...]:
        """Adds a node with `outputs` results; None stands for an input that is not given."""
        given = list(inputs)
        while given and given[-1] is None:  # ONNX Runtime crashes on some that end with one
            given.pop()
        node = ir.node(
            op_type,
            given,
            attributes={k: v for k, v in attributes.items() if v is not None},
            domain=domain,
            num_outputs=outputs,
        )
        self.nodes.append(node)
        return tuple(node.outputs)

    def op(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Adds a node with one result."""
        return self.nodes_of(op_type, inputs, **attributes)[0]

    def constant(self, value: Any, dtype: np.dtype[Any] | type) -> ir.Value:
        """A small initializer; the same value is the same initializer."""
        array: NDArray[Any] = np.asarray(value, dtype=dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self._initializer(
                ir.Tensor(array, name=f"constant_{len(self._constants)}"), array.shape
            )
        return self._constants[key]

    def ints(self, *values: int) -> ir.Value:
        """i64 [len(values)]"""
        return self.constant(list(values), np.int64)

    def weight(self, name: str, tensor: torch.Tensor) -> ir.Value:
        """A parameter under its own name; tied parameters are one initializer."""
        tensor = tensor.detach()
        key = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        if tensor.numel() == 0 or key not in self._weights:
            contiguous = tensor.contiguous()
            value = self._initializer(
                tensor_adapters.TorchTensor(contiguous, name=name), contiguous.shape
            )
            self._weights[key], self._tensors[value] = value, contiguous
        return self._weights[key]

    def packed(self, weight: ir.Value, *, transposed: bool) -> ir.Value | None:
        """A parameter [N, K], or [K, N] if `transposed`, in the panels of `octavo::Linear`.

        None if `weight` is no float32 parameter. Packed only when the model is written.
        """
        tensor = self._tensors.get(weight)
        if tensor is None or tensor.dtype != torch.float32 or tensor.dim() != 2:
            return None
        key = (weight, transposed)
        if key not in self._packed:
            rows = tensor.t() if transposed else tensor
            panels, name = -(-rows.shape[0] // PANEL), f"{weight.name}.packed"
            shape = (panels, rows.shape[1], PANEL)
            lazy = ir.LazyTensor(
                lambda: tensor_adapters.TorchTensor(panels_of(rows), name=name),
                dtype=ir.DataType.FLOAT,
                shape=ir.Shape(shape),
                name=name,
            )
            self._packed[key] = self._initializer(lazy, shape)
        return self._packed[key]

    def _initializer(self, tensor: ir.TensorProtocol, shape: Sequence[int]) -> ir.Value:
        value = ir.Value(
            name=tensor.name,
            shape=ir.Shape(list(shape)),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        self.initializers.append(value)
        return value
