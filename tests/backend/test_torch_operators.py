"""The native kernels as operators of PyTorch: the references' numbers, caches changed in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.backends.kernels import torch_operators
from octavo.graphs.ops import linear_torch

NONE = torch.zeros(0)
NO_ROWS = torch.zeros(0, 0)
reference: Any = torch.ops.octavo


@pytest.fixture(scope="module")
def native() -> dict[str, Any]:
    return torch_operators.operators()


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator)


def assert_same(found: Tensor, wanted: Tensor) -> None:
    if wanted.dtype.is_floating_point:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(found, wanted)


def quantized() -> tuple[Tensor, Tensor, Tensor]:
    rows: tuple[Tensor, Tensor, Tensor] = reference.quantize(random(7, 96))
    return rows


def arguments() -> dict[str, tuple[Any, ...]]:
    weight = torch.randint(0, 255, (1, 24, 32, 4), dtype=torch.uint8)
    scales = torch.rand(32)
    quantised_linear = (*quantized(), weight, scales, torch.zeros(0, 0, 0, dtype=torch.float16))
    return {
        "activate": (random(7, 96), 1, 1),
        "activate_quantize": (random(7, 96), 1, 0),
        "linear": (random(7, 40), linear_torch.packed(random(50, 40)), random(50), NO_ROWS, 50),
        "norm": (random(7, 96), random(7, 96), random(96), NONE, 1e-5, 0),
        "norm_quantize": (random(7, 96), NO_ROWS, random(96), random(96), 1e-5, 1),
        "quantize": (random(7, 96),),
        "quantized_linear": (
            *quantised_linear, torch.zeros(0, 0, 0, dtype=torch.float16),
            random(32), random(7, 32), 32, 8, 128,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", arguments())
def test_results_are_the_references(native: dict[str, Any], name: str) -> None:
    given = arguments()[name]
    found, wanted = native[name](*given), getattr(reference, name)(*given)
    if isinstance(wanted, Tensor):
        found, wanted = (found,), (wanted,)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert_same(one, other)


def step(tokens: int) -> tuple[Tensor, ...]:
    """Slots, tables, starts and prefixes of two sequences, one of them decoding its 20th token."""
    slots = torch.cat([torch.arange(tokens - 1), torch.tensor([3 * 16 + 3])]).int()
    tables = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    starts = torch.tensor([0, tokens - 1, tokens], dtype=torch.int32)
    return slots, tables, starts, torch.tensor([0, 19], dtype=torch.int32), NONE, NONE


ATTENTION = (0.25, 1, 0, 0.0)  # scale, causal, window, softcap


@pytest.mark.parametrize("transposed", [1])
def test_attention_changes_the_cache_it_is_given(native: dict[str, Any], transposed: int) -> None:
    cache = random(4, 2, 2, 16, 16)
    operands = random(9, 4, 16), random(9, 2, 16), random(9, 2, 16)
    wanted, changed = reference.paged_attention(*operands, cache, *step(9), *ATTENTION, transposed)
    found = native["paged_attention"](*operands, cache, *step(9), *ATTENTION, transposed)
    assert_same(found, wanted)
    assert torch.equal(cache, changed)


@pytest.mark.parametrize("integers", [False, True])
def test_fused_attention_changes_the_cache_it_is_given(
    native: dict[str, Any], integers: bool
) -> None:
    packed = random(9, 128), torch.rand(9, 16), torch.rand(9, 16), random(16), random(16)
    attributes = 4, 2, 16, 0, 1e-6, *ATTENTION, 1
    if integers:
        caches: tuple[Tensor, ...] = (
            torch.zeros(4, 2, 2, 16, 16, dtype=torch.int8),
            torch.zeros(4, 2, 2, 16),
        )
        name = "fused_paged_attention_int8"
    else:
        caches, name = (random(4, 2, 2, 16, 16),), "fused_paged_attention"
    wanted, *changed = getattr(reference, name)(*packed, *caches, *step(9), *attributes)
    found = native[name](*packed, *caches, *step(9), *attributes)
    assert_same(found, wanted)
    for one, other in zip(caches, changed, strict=True):
        assert_same(one, other)


def test_threads_change_no_bit(native: dict[str, Any]) -> None:
    weight, rows = linear_torch.packed(random(300, 200)), random(130, 200)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(native["linear"](rows, weight, NONE, NO_ROWS, 300))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (random(96, 7).t(), "input 0 of Norm is not contiguous"),
        (random(7, 96).double(), "input 0 of Norm has another dtype"),
        (random(7), "input has 1 dimensions and needs 2"),
        (random(7, 95), "weight has 96 elements and the input 95 columns"),
    ],
)
def test_what_a_kernel_cannot_take_is_refused(
    native: dict[str, Any], rows: Tensor, sentence: str
) -> None:
    with pytest.raises(RuntimeError, match=sentence):
        native["norm"](rows, NO_ROWS, random(96), NONE, 1e-5, 0)
    assert sentence in torch_operators.take_error()
    assert torch_operators.take_error() == ""


def test_the_reference_stays_what_eager_mode_runs(native: dict[str, Any]) -> None:
    """The oracle would prove nothing if it ran the kernels."""
    key = "CPU"
    assert native
    for schema in torch_operators.SCHEMAS:
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        assert has_kernel(f"{torch_operators.LIBRARY}::{schema.name}", key)
        assert not has_kernel(f"octavo::{schema.name}", key)
