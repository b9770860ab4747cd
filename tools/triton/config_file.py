"""config.pbtxt: what Triton has to know of a model before it loads it."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.tools.triton.stub.tensors import INPUTS, OUTPUTS, Tensor


def config_pbtxt(name: str, instances: int) -> str:
    """Of the model `name` with so many instances, in protobuf's text format."""
    return f"""name: "{name}"
backend: "python"
max_batch_size: 0  # the engine batches by itself
model_transaction_policy {{ decoupled: true }}
input [
{_tensors(INPUTS.values(), "optional: true ")}
]
output [
{_tensors(OUTPUTS.values())}
]
instance_group [ {{ count: {instances} kind: KIND_CPU }} ]
"""


def _tensors(declared: Iterable[Tensor], options: str = "") -> str:
    return ",\n".join(
        f'  {{ name: "{tensor.name}" data_type: {tensor.data_type} '
        f"dims: [ {tensor.size} ] {options}}}"
        for tensor in declared
    )
