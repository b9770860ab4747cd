"""docs/triton.md against the tensors and metrics that it names."""

from __future__ import annotations

from pathlib import Path

from octavo.tools.triton.child_metrics import VLLM_NAMES
from octavo.tools.triton.stub.tensors import ANY, INPUTS, OUTPUTS, Tensor

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "triton.md").read_text(encoding="utf-8")


def row(tensor: Tensor) -> str:
    size = "[-1]" if tensor.size == ANY else ""
    data_type = tensor.data_type.removeprefix("TYPE_")
    return f"| `{tensor.name}` | {data_type}{size} | {tensor.documentation} |"


def test_the_page_lists_every_tensor_as_it_is_declared() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    declared = [row(tensor) for tensor in (*INPUTS.values(), *OUTPUTS.values())]
    assert [line for line in rows if line in declared] == declared


def test_the_page_names_every_metric_of_the_vllm_backend() -> None:
    assert [name for name in VLLM_NAMES if f"`{name}`" not in PAGE] == []
