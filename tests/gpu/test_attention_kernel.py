"""The Triton kernel on a GPU: against the reference, in every schedule, by both launchers."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.backends import cuda_devices
from octavo.backends.gpu_attention import AttentionShape, torch_attention
from octavo.backends.gpu_attention.compiled import compile_image
from octavo.backends.gpu_attention.launch import AttentionPointers, LoadedAttention
from tests.backend.gpu_attention_steps import Histories, Step, attention_shape

TOLERANCES = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one head": {"num_heads": 1, "num_kv_heads": 1},
    "a group of eight": {"num_heads": 16, "num_kv_heads": 2},
    "heads of 128": {"head_size": 128, "value_head_size": 128},
    "odd heads": {"head_size": 80, "value_head_size": 48},
    "a window": {"sliding_window": 24},
    "a cap": {"softcap": 5.0},
    "sinks": {"has_sinks": True},
    "slopes": {"has_alibi": True},
    "blocks of 32": {"block_size": 32},
}
LENGTHS = (150, 33, 1, 64)
PARTS = ((0, 149, 1), (1, 5, 28), (2, 0, 1), (3, 60, 4))  # decode, chunk, prefill, verification
_TENSORS = [field.name for field in fields(Step) if field.name != "shape"]


def on_device(step: Step) -> Step:
    return replace(step, **{name: getattr(step, name).cuda() for name in _TENSORS})


def run(step: Step) -> Tensor:
    attend: Any = torch_attention.paged_attention_
    output: Tensor = attend(*on_device(step).operands, step.shape)
    return output.cpu()


def near(shape: AttentionShape, found: Tensor, wanted: Tensor) -> None:
    limit = TOLERANCES[shape.dtype]
    torch.testing.assert_close(found.float(), wanted, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", SHAPES)
def test_a_mixed_batch_agrees_with_the_reference(name: str, dtype: str) -> None:
    shape = attention_shape(dtype=dtype, **SHAPES[name])
    step = Histories(shape, LENGTHS).step(PARTS)
    near(shape, run(step), step.reference())


def test_a_cache_of_float8() -> None:
    shape = attention_shape(dtype="bfloat16", cache_dtype="float8_e4m3fn")
    step = Histories(shape, LENGTHS).step(PARTS)
    near(shape, run(step), step.reference())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", ["plain", "a window", "a group of eight", "heads of 128"])
def test_a_row_has_the_same_bits_in_every_batch(name: str, dtype: str) -> None:
    shape = attention_shape(dtype=dtype, **SHAPES[name])
    histories = Histories(shape, LENGTHS)
    whole = run(histories.step([(i, 0, length) for i, length in enumerate(LENGTHS)]))
    rows = torch.split(whole, list(LENGTHS))
    mixed = torch.split(run(histories.step(PARTS)), [count for _, _, count in PARTS])
    for (sequence, start, count), found in zip(PARTS, mixed, strict=True):
        assert torch.equal(found, rows[sequence][start : start + count])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_both_launchers_give_the_same_bits(dtype: str) -> None:
    """What was compiled ahead is what Triton compiles here."""
    shape = attention_shape(dtype=dtype, head_size=64, value_head_size=64)
    step = Histories(shape, LENGTHS).step(PARTS)
    wanted = run(step)
    given = on_device(step)
    capability = cuda_devices.compute_capabilities()[0]
    loaded = LoadedAttention(compile_image(shape, capability))
    output = torch.empty_like(wanted, device="cuda")
    addresses = {name: getattr(given, name).data_ptr() for name in _TENSORS}
    pointers = AttentionPointers(**addresses, output=output.data_ptr())
    width = given.block_tables.shape[1]
    stream = torch.cuda.current_stream()
    loaded.launch(pointers, len(given.query), len(PARTS), width, stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(output.cpu(), wanted)
    loaded.close()
