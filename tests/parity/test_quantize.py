"""The passes that make integers of weights, activations and cache, before and after."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from octavo.compiler.passes.flatten_batch import flatten_batch
from octavo.compiler.passes.linear_layers import linear_layers
from octavo.compiler.passes.parameters import parameter
from octavo.compiler.passes.quantize import quantize_weights
from octavo.compiler.passes.quantize_embeddings import quantize_embeddings
from octavo.compiler.quantization import int4, int8, tables
from octavo.compiler.quantization.gguf_blocks import GgufBlocks
from octavo.graphs.errors import BuildError
from octavo.graphs.ops import linear_torch as _registers_the_operator  # noqa: F401
from tests.parity.test_passes import captured, count, results

QUANTIZERS = {"int8": int8.quantize, "int4": int4.quantize}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Layer(nn.Module):
    """A layer that is not the head: another follows, whose matrix is too small to be quantised."""

    def __init__(self, function: Callable[..., Tensor], depth: int, columns: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(normal(columns, depth, seed=1))
        self.by_depth = nn.Parameter(self.weight.detach().t().contiguous())
        self.bias = nn.Parameter(normal(columns, seed=2))
        self.head = nn.Parameter(normal(3, columns, seed=3))
        self.register_buffer("none", torch.zeros(0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        result = self.function(self, x)
        return nn.functional.linear(result, self.head), result


def exported(module: nn.Module, *inputs: Tensor) -> ExportedProgram:
    rows = Dim("rows", min=1, max=64)
    shapes = tuple({x.shape.index(7): rows} for x in inputs)
    return torch.export.export(module.eval(), inputs, dynamic_shapes=(shapes,), strict=False)


def run(program: ExportedProgram, *inputs: Tensor) -> Any:
    with torch.no_grad():
        return program.module()(*inputs)


class Calls(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Any:
        return self.module(*inputs)


LAYERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "linear": lambda m, x: nn.functional.linear(x, m.weight),
    "linear with a bias": lambda m, x: nn.functional.linear(x, m.weight, m.bias),
    "addmm": lambda m, x: torch.addmm(m.bias, x, m.by_depth),
    "residual": lambda m, x: torch.ops.octavo.linear_residual(
        x, m.weight, m.none, x[:, :1].expand(-1, 70) * 2
    ),
}


def bound(x: Tensor, weight: Tensor, mode: str) -> np.ndarray[Any, Any]:
    """How far sums of x * w may move: |x| * |dw| + |w'| * |dx|, with dx at most half a scale."""
    inputs, exact = x.double(), weight.double()
    rounded = QUANTIZERS[mode](weight).dequantized(weight.shape[1]).double()
    padded = nn.functional.pad(inputs, (0, -inputs.shape[1] % 32))
    step = padded.view(len(x), -1, 32).abs().amax(-1) / 127
    moved = step.repeat_interleave(32, 1)[:, : inputs.shape[1]] / 2
    limit = inputs.abs() @ (rounded - exact).abs().T + moved @ rounded.abs().T
    result: np.ndarray[Any, Any] = limit.numpy() * (1 + 1e-4)
    return result


@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize("kind", list(LAYERS))
def test_a_layer_moves_by_what_is_rounded(kind: str, mode: Any) -> None:
    x = normal(7, 100)
    layer = Layer(LAYERS[kind], 100, 70)
    program = exported(Calls(layer), x)
    before = run(program, x)[1]
    program, record = quantize_weights(program, mode)
    assert count(program, "quantized_linear") == 1
    assert record.matches == 1
    after = run(program, x)[1]
    difference = (after - before).abs().double().numpy()
    assert (difference <= bound(x, layer.weight.detach(), mode)).all()
    assert difference.max() > 0


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_leading_axes_are_kept(mode: Any) -> None:
    x = normal(1, 7, 96)
    layer = Layer(LAYERS["linear with a bias"], 96, 64)
    program = exported(Calls(layer), x)
    before = run(program, x)[1]
    program, _ = quantize_weights(program, mode)
    after = run(program, x)[1]
    assert after.shape == before.shape == (1, 7, 64)
    difference = (after - before).abs().double().numpy()[0]
    assert (difference <= bound(x[0], layer.weight.detach(), mode)).all()


def test_weights_that_were_transposed_are_parameters_too() -> None:
    """GPT-2 keeps its weights [K, N]."""
    program, _ = flatten_batch(captured("gpt2").exported)
    names = [layer.name for layer in linear_layers(program)]
    assert len(names) == 2 * 4 + 1
    before = results(program)
    program, record = quantize_weights(program, "int8")
    assert record.matches == len(names)
    after = results(program)
    assert (after[0] - before[0]).abs().max() < 0.05 * before[0].abs().max()


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mistral"])
def test_whole_models_stay_close(model_type: str) -> None:
    program, _ = flatten_batch(captured(model_type).exported)
    before = results(program)
    program, _ = quantize_weights(program, "int8")
    after = results(program)
    for value, wanted in zip(after, before, strict=True):
        assert (value - wanted).norm() < 0.03 * wanted.norm()


def test_a_value_is_quantised_once_for_all_layers_that_read_it() -> None:
    program, _ = flatten_batch(captured("llama").exported)
    program, record = quantize_weights(program, "int8")
    # Two layers of: q, k, v; o; gate, up; down. Then the head.
    assert count(program, "octavo.quantized_linear") == 2 * 7 + 1
    assert count(program, "octavo.quantize.default") == 2 * 4 + 1
    assert count(program, "aten.linear") == 0
    assert record.notes[0] == "15 x 8 bits, one scale a column"


def test_floats_are_gone_but_for_what_is_read_otherwise() -> None:
    """B04: a build lets go of floats as it quantises them."""
    program, _ = flatten_batch(captured("llama").exported)
    matrices = [
        weakref.ref(tensor)
        for name, tensor in program.state_dict.items()
        if name.endswith(("proj.weight", "lm_head.weight"))
    ]
    assert len(matrices) == 15
    program, record = quantize_weights(program, "int8")
    gc.collect()
    assert [matrix for matrix in matrices if matrix() is not None] == []
    floats = {n for n, t in program.state_dict.items() if t.dtype == torch.float32 and t.dim() == 2}
    assert floats == {"no_rows", "model.model.embed_tokens.weight"}
    assert set(program.state_dict) >= {
        "model.model.layers.0.mlp.up_proj.quantized",
        "model.model.layers.0.mlp.up_proj.scales",
    }
    assert record.notes[1] == "311,296 bytes of weights became 82,432"


def test_the_head_keeps_8_bits_where_the_rest_has_4() -> None:
    program, _ = flatten_batch(captured("llama").exported)
    program, record = quantize_weights(program, "int4")
    bits = [
        node.args[-2]
        for node in program.graph.nodes
        if str(node.target) == "octavo.quantized_linear.default"
    ]
    assert bits == [4] * 14 + [8]
    assert record.notes[:2] == (
        "14 x 4 bits in groups of 32",
        "1 x 8 bits, one scale a column (the head, whose errors are the logits')",
    )


def test_what_chooses_experts_and_what_is_small_stays_float() -> None:
    program, _ = flatten_batch(captured("mixtral").exported)
    _, record = quantize_weights(program, "int8")
    assert count(program, "aten.linear") == 2
    assert record.skipped[0] == (
        "2 x stays float32: it chooses experts (model.model.layers.0.mlp.gate)"
    )
    assert record.skipped[1] == (
        "4 x stays float32: matrices of experts are no linear layer "
        "(model.model.layers.0.mlp.experts.gate_up_proj)"
    )
    small = exported(Calls(Layer(LAYERS["linear"], 100, 31)), normal(7, 100))
    _, record = quantize_weights(small, "int8")
    assert record.matches == 0
    assert record.skipped == (
        "1 x stays float32: a matrix of 31 x 100 is too small to gain (module)",
        "1 x stays float32: a matrix of 3 x 31 is too small to gain (module.head)",
    )


@pytest.mark.parametrize(("value", "reason"), [(float("nan"), "no finite"), (1e6, "beyond 65,504")])
def test_weights_without_integers_are_refused(value: float, reason: str) -> None:
    layer = Layer(LAYERS["linear"], 100, 70)
    layer.weight.data[3, 4] = value
    with pytest.raises(BuildError, match=reason):
        quantize_weights(exported(Calls(layer), normal(7, 100)), "int4")


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_blocks_of_the_checkpoint_are_taken_as_they_are(tmp_path: Path, mode: Any) -> None:
    kind = gguf.GGMLQuantizationType[{"int8": "Q8_0", "int4": "Q4_1"}[mode]]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for seed, name in enumerate(("q", "k")):
        weight = normal(64, 96, seed=seed).numpy()
        writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = gguf.GGUFReader(tmp_path / "m.gguf").tensors
    layer = Layer(LAYERS["linear"], 96, 128)
    floats = [torch.from_numpy(gguf.dequantize(t.data, kind)) for t in tensors]
    layer.weight.data = torch.cat(floats).flip(0)
    x = normal(7, 96)
    program = exported(Calls(layer), x)
    before = run(program, x)[1].double()
    program, record = quantize_weights(program, mode, GgufBlocks(tensors))
    assert record.notes[0] == f"1 x {kind.name} blocks of the checkpoint as they are"
    after = run(program, x)[1].double()
    # Only activations were rounded.
    step = x.view(7, -1, 32).abs().amax(-1).double() / 127
    moved = step.repeat_interleave(32, 1) / 2
    limit = moved @ layer.weight.detach().double().abs().T
    assert ((after - before).abs() <= limit * (1 + 1e-4)).all()


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_embeddings_move_by_half_a_scale(model_type: str) -> None:
    program, _ = flatten_batch(captured(model_type).exported)
    (node,) = (n for n in program.graph.nodes if str(n.target) == "aten.embedding.default")
    table = parameter(program, node.args[0])
    assert table is not None
    before = results(program)
    program, record = quantize_embeddings(program, smallest=table.numel())
    assert record.matches == 1
    assert count(program, "aten.embedding") == 0
    after = results(program)
    for value, wanted in zip(after, before, strict=True):
        assert (value - wanted).norm() < 0.02 * wanted.norm()
    (integers,) = (t for n, t in program.state_dict.items() if n.endswith("quantized_rows"))
    assert torch.equal(integers, tables.quantize(table.detach()).integers)


def test_small_tables_stay_float() -> None:
    program, _ = flatten_batch(captured("llama").exported)
    _, record = quantize_embeddings(program)
    assert record.matches == 0
    assert record.skipped == ("model.model.embed_tokens stays float32: 16,384 elements are few",)
    assert count(program, "aten.embedding") == 1
