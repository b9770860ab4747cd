"""How an operator of Octavo is declared: once, for torch, ONNX and the native kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DOMAIN = "octavo"
OPSET_VERSION = 1


@dataclass(frozen=True)
class Operand:
    """One tensor; `type_group` is "T" for the float type of the graph, else a fixed dtype."""

    name: str
    type_group: Literal["T", "float64", "float32", "float16", "int8", "uint8", "int32"]
    meaning: str


@dataclass(frozen=True)
class Attribute:
    name: str
    type: Literal["int", "float"]
    meaning: str


@dataclass(frozen=True)
class OperatorSchema:
    """An operator's name, tensors and attributes, in the order that every backend sees them."""

    name: str  # of the torch operator, `octavo::{name}`
    onnx_name: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    attributes: tuple[Attribute, ...]
    doc: str

    @property
    def changed_inputs(self) -> dict[int, int]:
        """Outputs that are an input with changes, both by their place: `kv_cache_out`."""
        places = {f"{operand.name}_out": index for index, operand in enumerate(self.inputs)}
        return {
            index: places[operand.name]
            for index, operand in enumerate(self.outputs)
            if operand.name in places
        }

    @property
    def torch_schema(self) -> str:
        """The schema string of `torch.library`; attributes follow the tensors."""
        tensors = [f"Tensor {operand.name}" for operand in self.inputs]
        outputs = ", ".join("Tensor" for _ in self.outputs)
        return f"{self.name}({', '.join(tensors + self._torch_attributes)}) -> ({outputs})"

    @property
    def in_place_torch_schema(self) -> str:
        """The same for an operator that changes inputs instead of returning them changed."""
        changed = self.changed_inputs
        marked = set(changed.values())
        tensors = [
            f"Tensor{f'(a{index}!)' if index in marked else ''} {operand.name}"
            for index, operand in enumerate(self.inputs)
        ]
        outputs = ", ".join("Tensor" for _ in range(len(self.outputs) - len(changed)))
        return f"{self.name}({', '.join(tensors + self._torch_attributes)}) -> ({outputs})"

    @property
    def _torch_attributes(self) -> list[str]:
        return [f"{attribute.type} {attribute.name}" for attribute in self.attributes]
