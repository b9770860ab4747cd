"""All fusions of row-wise work on captured models, and those that move or join what others made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from octavo.backends.onnx_lowering import Layouts, to_onnx
from octavo.compiler.passes.batch_views import remove_identity_views, split_batch_views
from octavo.compiler.passes.conv1d import conv1d
from octavo.compiler.passes.dead_code import remove_dead_code
from octavo.compiler.passes.flatten_batch import flatten_batch
from octavo.compiler.passes.functionalize import functionalize
from octavo.compiler.passes.fuse_activations import fuse_activations
from octavo.compiler.passes.fuse_norms import fuse_norms
from octavo.compiler.passes.fuse_quantize import fuse_quantize
from octavo.compiler.passes.fuse_residuals import fuse_residuals
from octavo.compiler.passes.matching import operator_of
from octavo.compiler.passes.merge_projections import merge_projections
from octavo.compiler.passes.select_rows import select_rows
from octavo.graphs.ops.activation import Function
from octavo.graphs.program import CapturedProgram
from octavo.graphs.spec import PassRecord
from tests.parity.test_fusions_rowwise import DEPTH, ROWS, Rowwise, check, check_module, normal
from tests.parity.test_passes import captured, results

OCTAVO: Any = torch.ops.octavo
PASSES = (
    functionalize,
    remove_dead_code,
    split_batch_views,
    flatten_batch,
    remove_identity_views,
    conv1d,
    merge_projections,
    fuse_norms,
    fuse_activations,
    fuse_residuals,
    select_rows,
)


def fused(exported: ExportedProgram) -> tuple[ExportedProgram, dict[str, PassRecord]]:
    records = {}
    for apply in PASSES:
        exported, record = apply(exported)
        records[record.name] = record
    exported.graph.lint()
    return exported, records


def operators(exported: ExportedProgram) -> Counter[str]:
    return Counter(operator_of(node) for node in exported.graph.nodes if operator_of(node))


@dataclass(frozen=True)
class Matches:
    """Of two layers; `rows`: nodes of the last layer that work on the wanted rows only."""

    norms: int
    sums: int  # norms with the addition before them
    gated: int
    plain: int
    residuals: int
    rows: int


MODELS = {
    # Two norms a layer and the last one; o_proj and down_proj add the residual. Behind the last
    # attention: two layers with residual, two norms with a result each, gate and up, activation.
    "llama": Matches(norms=5, sums=0, gated=2, plain=0, residuals=4, rows=8),
    "qwen2": Matches(norms=5, sums=0, gated=2, plain=0, residuals=4, rows=8),
    # Norms before and after both parts of a layer: what is added is a norm's result.
    "gemma2": Matches(norms=9, sums=4, gated=2, plain=0, residuals=0, rows=13),
    # Two more a layer, of the heads' queries and keys.
    "gemma3_text": Matches(norms=13, sums=4, gated=2, plain=0, residuals=0, rows=13),
    # The sum of both embeddings goes into the first norm.
    "gpt2": Matches(norms=5, sums=1, gated=0, plain=2, residuals=4, rows=8),
    # MLP and attention side by side: their sum is one layer's residual, the stream goes into the
    # next norm. In GPT-NeoX the MLP has a norm of its own.
    "gpt_neox": Matches(norms=5, sums=2, gated=0, plain=2, residuals=2, rows=8),
    "phi": Matches(norms=3, sums=2, gated=0, plain=2, residuals=2, rows=6),
    # Spelled-out layer norms without bias; the stream goes from o_proj to down_proj.
    "cohere": Matches(norms=3, sums=0, gated=2, plain=0, residuals=4, rows=6),
    # The experts' sum is no linear layer, and no row-wise node.
    "mixtral": Matches(norms=5, sums=2, gated=2, plain=0, residuals=2, rows=2),
    "gpt_oss": Matches(norms=5, sums=2, gated=0, plain=0, residuals=2, rows=2),
    # Norms only behind attention and MLP, and of all queries and keys at once.
    "olmo2": Matches(norms=9, sums=1, gated=2, plain=0, residuals=0, rows=11),
    # relu(x)^2, layer norms with 1 + weight.
    "nemotron": Matches(norms=5, sums=0, gated=0, plain=2, residuals=4, rows=8),
}


def count_of(record: PassRecord, word: str) -> int:
    """The number that starts the note with `word` in it."""
    return next((int(note.split()[0]) for note in record.notes if word in note), 0)


@pytest.mark.parametrize("model_type", MODELS)
def test_models_compute_the_same_with_the_nodes_that_their_code_calls_for(model_type: str) -> None:
    exported = captured(model_type).exported
    expected = results(exported)
    exported, records = fused(exported)
    for value, wanted in zip(results(exported), expected, strict=True):
        scale = float(wanted.abs().max())
        torch.testing.assert_close(value, wanted, rtol=0, atol=2e-6 * scale)
    assert MODELS[model_type] == Matches(
        norms=records["fuse_norms"].matches,
        sums=count_of(records["fuse_norms"], "addition"),
        gated=count_of(records["fuse_activations"], "gated"),
        plain=count_of(records["fuse_activations"], "plain"),
        residuals=records["fuse_residuals"].matches,
        rows=count_of(records["select_rows"], "wanted rows"),
    )
    left = operators(exported)
    assert left["octavo.norm"] == MODELS[model_type].norms
    assert not {"aten.layer_norm", "aten.rsqrt", "aten.silu", "aten.gelu"} & left.keys()


def test_records_say_what_was_left() -> None:
    """GPT-OSS's experts clamp their gate, which the operator has no function for."""
    _, records = fused(captured("gpt_oss").exported)
    assert records["fuse_activations"].skipped == ("2 x a sigmoid that is no SiLU of its argument",)


@cache
def fused_program(model_type: str) -> CapturedProgram:
    program = captured(model_type)
    return replace(program, exported=fused(program.exported)[0])


def onnx_results(model: ir.Model, arguments: list[np.ndarray[Any, Any]]) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [value.name for value in session.get_inputs()]
    return session.run(None, dict(zip(names, arguments, strict=True)))


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@pytest.mark.parametrize("rows", [[], [4], [13, 4, 9]])
def test_lowered_graphs_run_by_their_function_bodies(model_type: str, rows: list[int]) -> None:
    program = fused_program(model_type)
    exported = program.exported
    caches = [
        torch.zeros(6, *node.meta["val"].shape[1:])
        for node in exported.graph.nodes
        if node.name.startswith("kv_caches")
    ]
    block = torch.tensor([1] * 5 + [2] * 9)
    positions = torch.cat([torch.arange(5), torch.arange(9)])
    step = (
        torch.arange(14) * 7,
        positions,
        block * 16 + positions % 16,
        torch.tensor([[1], [2]]),
        torch.tensor([0, 5, 14]),
        torch.tensor([0, 0]),
        torch.tensor(rows),
    )
    indices = [x.to(torch.int32) for x in step]
    with torch.no_grad():
        expected, _ = exported.module()(*indices, caches)
    model = to_onnx(program, Layouts())
    logits = onnx_results(model, [x.numpy() for x in [*indices, *caches]])[0]
    assert logits.shape == (len(rows), 256)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4 * 256)


def test_a_backend_may_choose_the_caches_type_and_leave_bodies_out() -> None:
    """As TensorRT does, whose parser prefers a body to a plugin."""
    program = captured("llama")
    program = replace(program, exported=remove_dead_code(functionalize(program.exported)[0])[0])
    ours = {"PagedAttention"}
    whole = to_onnx(program, Layouts())
    assert {function.name for function in whole.functions.values()} == ours
    bare = to_onnx(
        program,
        Layouts(without_bodies=frozenset(ours), cache_dtype=torch.float8_e4m3fn),
    )
    assert not bare.functions
    caches = [
        value
        for value in (*bare.graph.inputs, *bare.graph.outputs)
        if cast(str, value.name).startswith("kv_cache")
    ]
    assert [value.dtype for value in caches] == [ir.DataType.FLOAT8E4M3FN] * 4
    assert bare.graph.outputs[0].dtype == ir.DataType.FLOAT


def test_packed_layers_get_bias_and_residual() -> None:
    model = to_onnx(fused_program("gpt2"), Layouts(packed_linear=True))
    layers = [node for node in model.graph if node.op_type == "Linear"]
    shapes = [
        [list(cast(ir.Shape, cast(ir.Value, v).shape)) for v in n.inputs[1:3]] for n in layers
    ]
    residuals = [cast(ir.Value, node.inputs[-1]).producer() for node in layers]
    with_residual = [n for n, producer in enumerate(residuals) if producer is not None]
    # c_attn, c_proj, c_fc, c_proj a layer, then the head.
    assert with_residual == [1, 3, 5, 7]
    assert shapes[:2] == [[[12, 64, 16], [192]], [[4, 64, 16], [64]]]


class Step(nn.Module):
    """What stands behind the last attention, and what else reads of it."""

    def __init__(self, also: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.also = also
        self.matrix = nn.Parameter(normal(DEPTH, DEPTH, seed=1))
        self.bias = nn.Parameter(normal(DEPTH, seed=2))

    def forward(self, x: Tensor, y: Tensor, logits_indices: Tensor) -> Any:
        stream = OCTAVO.linear_residual(x, self.matrix, self.bias, y)
        output, total = OCTAVO.norm(stream, y, self.bias, self.bias[:0], 1e-5, 0)
        hidden = OCTAVO.activate(output[:, :8] * 2, Function.GELU, 0).softmax(-1)
        chosen = (hidden + total[:, :8])[logits_indices.long()]
        return chosen if self.also is None else (chosen, self.also(stream, hidden))


def selected(also: Callable[[Tensor, Tensor], Tensor] | None) -> tuple[set[str], PassRecord]:
    """The operators that still work on every row."""
    inputs = (normal(ROWS, DEPTH), normal(ROWS, DEPTH, seed=4), torch.tensor([5, 0, 5]))
    _, record, exported = check_module(select_rows, Step(also), *inputs)
    on_all_rows = set()
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        first: Any = value[0] if isinstance(value, tuple) else value
        if isinstance(first, Tensor) and not isinstance(cast(Any, first.shape[0]), int):
            on_all_rows.add(operator_of(node))
    return on_all_rows - {""}, record


def test_the_gather_moves_up_to_the_inputs() -> None:
    on_all_rows, record = selected(None)
    assert on_all_rows == set()
    # A layer, a norm with two results, two slices, a product, an activation, softmax, a sum.
    assert record.notes == ("10 nodes work on the wanted rows only, from an input on",)


def test_what_others_read_stays_on_all_rows() -> None:
    on_all_rows, record = selected(lambda stream, hidden: hidden.cumsum(0))
    everything = {"octavo.linear_residual", "octavo.norm", "getitem", "aten.slice", "aten.mul"}
    assert on_all_rows == everything | {"octavo.activate", "aten.softmax", "aten.cumsum"}
    assert record.notes == ("2 nodes work on the wanted rows only, from aten.softmax, getitem on",)
    on_all_rows, record = selected(lambda stream, hidden: stream.cumsum(0))
    assert on_all_rows == {"octavo.linear_residual", "aten.cumsum"}


def test_rows_that_depend_on_others_are_computed_first() -> None:
    class Mixes(nn.Module):
        def forward(self, x: Tensor, logits_indices: Tensor) -> Tensor:
            return x.cumsum(0).softmax(0)[logits_indices.long()]

    _, record, _ = check_module(select_rows, Mixes(), normal(ROWS, DEPTH), torch.tensor([5, 0, 5]))
    assert record.matches == 0
    assert record.skipped == (
        "the wanted rows are chosen from aten.softmax, which is not row by row",
    )


def norm_then(*readers: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
    """A norm whose result is quantised once; `readers` get its result and its sum."""

    def function(m: Rowwise, x: Tensor, y: Tensor) -> Any:
        output, total = OCTAVO.norm(x, y, m.weight, m.bias, 1e-5, 1)
        return (*OCTAVO.quantize(output), *(reader(output, total) for reader in readers))

    return function


def test_a_norm_that_is_only_quantised_is_quantised_at_once() -> None:
    inputs = (normal(ROWS, DEPTH), normal(ROWS, DEPTH, seed=4))
    left, record, _ = check(fuse_quantize, norm_then(), *inputs)
    assert (left, record.notes) == (["octavo.norm_quantize"], ("1 x norm",))
    left, _, _ = check(fuse_quantize, norm_then(lambda output, total: total * 2), *inputs)
    assert left == ["octavo.norm_quantize", "aten.mul"]
    left, record, _ = check(fuse_quantize, norm_then(lambda output, total: output * 2), *inputs)
    assert left == ["octavo.norm", "octavo.quantize", "aten.mul"]
    assert record.skipped == ("1 x the float result of norm has other readers",)


def test_an_activation_that_is_only_quantised_is_quantised_at_once() -> None:
    def function(m: Rowwise, x: Tensor) -> Any:
        return OCTAVO.quantize(OCTAVO.activate(x, Function.SILU, 1))

    left, record, _ = check(fuse_quantize, function, normal(ROWS, DEPTH))
    assert (left, record.notes) == (["octavo.activate_quantize"], ("1 x activate",))
    left, record, _ = check(fuse_quantize, lambda m, x: OCTAVO.quantize(x + 1), normal(ROWS, DEPTH))
    assert record.skipped == ("1 x aten.add does not quantise",)
