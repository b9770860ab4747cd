"""The GPU attention kernels under Triton's interpreter, on the CPU.

`test_gpu_attention.py` runs this file in a process of its own: TRITON_INTERPRET must be set before
Triton is imported, and whoever compiles must not have it set.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.backends.gpu_attention import AttentionShape, prefer
from octavo.backends.gpu_attention.torch_attention import paged_attention_
from tests.backend.gpu_attention_steps import Histories, Step, attention_shape, stored_values

# Against float32 on the same stored values. Half precision rounds the weights of the softmax to its
# dtype before they meet the values, and the result; the interpreter cuts bfloat16 off instead.
TOLERANCES = {"float32": 4e-6, "float16": 3e-3, "bfloat16": 4e-2}
INTERPRETED = settings(
    deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@st.composite
def shapes(draw: st.DrawFn) -> AttentionShape:
    dtype = draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    kv_heads = draw(st.integers(1, 2))
    head_size = draw(st.sampled_from([8, 16, 40, 64]))
    return attention_shape(
        num_heads=kv_heads * draw(st.sampled_from([1, 2, 3, 7, 20])),
        num_kv_heads=kv_heads,
        head_size=head_size,
        value_head_size=draw(st.sampled_from([head_size, 24, 80])),
        block_size=draw(st.sampled_from([16, 32])),
        causal=draw(st.booleans()),
        sliding_window=draw(st.sampled_from([0, 1, 9, 45])),
        softcap=draw(st.sampled_from([0.0, 2.0])),
        has_sinks=draw(st.booleans()),
        has_alibi=draw(st.booleans()),
        dtype=dtype,
        cache_dtype=draw(st.sampled_from([dtype, "float8_e4m3fn"])),
    )


# (tokens in the cache, tokens of the step): decode, verification, chunks, whole prompts, none.
batches = st.lists(
    st.tuples(st.integers(0, 70), st.sampled_from([0, 1, 1, 4, 17, 40])), min_size=1, max_size=4
).filter(lambda batch: any(count for _, count in batch))


def run(step: Step) -> Tensor:
    return paged_attention_(*step.operands, step.shape)


def assert_right(step: Step) -> None:
    expected = step.reference()
    actual = run(step)
    assert actual.dtype == step.query.dtype
    limit = TOLERANCES[step.shape.dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=limit, atol=limit)


@INTERPRETED
@given(shapes(), batches, st.integers(0, 99))
def test_any_batch_agrees_with_the_reference(
    shape: AttentionShape, batch: list[tuple[int, int]], seed: int
) -> None:
    histories = Histories(shape, [max(1, sum(one)) for one in batch], seed)
    step = histories.step([(i, prefix, count) for i, (prefix, count) in enumerate(batch)])
    assert_right(step)


def test_a_group_of_heads_larger_than_a_tile() -> None:
    shape = attention_shape(num_heads=70, num_kv_heads=1, head_size=8, value_head_size=8)
    assert_right(Histories(shape, [21, 9]).step([(0, 18, 3), (1, 0, 9)]))


def test_the_cache_holds_keys_and_values_where_the_slots_say() -> None:
    shape = attention_shape(head_size=24, value_head_size=16)
    step = Histories(shape, [20]).step([(0, 0, 20)])
    step.slot_mapping[3] = -1
    written = step.slot_mapping.long()
    run(step)
    for token, slot in enumerate(written.tolist()):
        keys = step.kv_cache[slot // 16, 0, :, slot % 16]
        values = step.kv_cache[slot // 16, 1, :, slot % 16]
        if token != 3:
            torch.testing.assert_close(keys, step.key[token], rtol=0, atol=0)
            torch.testing.assert_close(values[:, :16], step.value[token], rtol=0, atol=0)
    # 19 tokens times two heads times 24 + 16 elements: everything else is NaN as before.
    assert int(step.kv_cache.isfinite().sum()) == 19 * 2 * 40


def test_float8_rounds_as_torch_does_and_saturates() -> None:
    shape = attention_shape(num_heads=1, num_kv_heads=1, cache_dtype="float8_e4m3fn")
    step = Histories(shape, [40]).step([(0, 0, 40)])
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()].sort().values
    halfway = (codes[1:] + codes[:-1]) / 2
    beyond = torch.tensor([1e-6, 2.0**-10, -(2.0**-10), 449.0, 470.0, -1e9, 3e38, float("nan")])
    below = torch.nextafter(halfway, torch.tensor(0.0))
    values = torch.cat([codes[::2], halfway, below, beyond])[: 40 * 16]
    assert len(values) > 600
    rows = torch.zeros(40 * 16)
    rows[-len(values) :] = values
    step.key, step.value = rows.view(40, 1, 16), rows.flip(0).view(40, 1, 16)
    run(step)
    slots = step.slot_mapping.long()
    for plane, expected in ((0, step.key), (1, step.value)):
        stored = step.kv_cache[slots // 16, plane, :, slots % 16]
        wanted = stored_values(expected, shape).to(torch.float8_e4m3fn)
        assert torch.equal(stored.view(torch.uint8), wanted.view(torch.uint8))


def test_every_float8_code_is_read_as_torch_reads_it() -> None:
    # With one key per sequence, attention returns that key's value.
    shape = attention_shape(
        num_heads=1, num_kv_heads=1, head_size=256, value_head_size=256,
        dtype="float16", cache_dtype="float8_e4m3fn",
    )  # fmt: skip
    step = Histories(shape, [1]).step([(0, 0, 1)])
    codes = torch.arange(256, dtype=torch.uint8)
    step.kv_cache[int(step.block_tables[0, 0]), 0] = 0.0
    step.kv_cache.view(torch.uint8)[int(step.block_tables[0, 0]), 1, 0, 0] = codes
    step.slot_mapping[:] = -1
    expected = codes.view(torch.float8_e4m3fn).half()
    torch.testing.assert_close(run(step)[0, 0], expected, rtol=0, atol=0, equal_nan=True)


def test_rows_behind_the_last_sequence_are_zeros() -> None:
    histories = Histories(attention_shape(), [5, 3])
    alone, padded = (histories.step([(0, 0, 5), (1, 2, 1)]) for _ in range(2))
    for name in ("query", "key", "value"):
        rows = getattr(padded, name)
        setattr(padded, name, torch.cat([rows, torch.full_like(rows[:4], float("nan"))]))
    padded.slot_mapping = torch.cat([padded.slot_mapping, torch.full((4,), -1).int()])
    output = run(padded)
    assert torch.equal(output[:6], run(alone))
    assert torch.equal(output[6:], torch.zeros(4, 4, 16))


def test_no_sequence_at_all() -> None:
    step = Histories(attention_shape(), [3]).step([(0, 0, 3)])
    step.block_tables, step.prefix_offsets = step.block_tables[:0], step.prefix_offsets[:0]
    step.query_start_loc, step.slot_mapping = step.query_start_loc[:1], -1 - 0 * step.slot_mapping
    assert torch.equal(run(step), torch.zeros(3, 4, 16))


def test_blocks_before_the_window_are_not_read() -> None:
    shape = attention_shape(sliding_window=20)
    histories = Histories(shape, [90])
    whole, poisoned = (histories.step([(0, 70, 20)]) for _ in range(2))
    # The first token, at 70, sees keys from 51 on: blocks 0 to 2 have been given away, of which
    # the last shares its 32 keys of the kernel's loop with a block that is needed.
    poisoned.kv_cache[histories.tables[0][:3].long()] = float("inf")
    poisoned.block_tables[0, :2] = -7
    assert torch.equal(run(poisoned), run(whole))


EVERYTHING: dict[str, Any] = {
    "num_heads": 6, "head_size": 40, "value_head_size": 24,
    "sliding_window": 19, "softcap": 3.0, "has_sinks": True, "has_alibi": True,
}  # fmt: skip


@pytest.fixture
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products whose rows do not depend on their place in a tile.

    Those of a GPU's matrix instructions do not; numpy's BLAS, which the interpreter takes, sums the
    last rows of a matrix in another order than the first.
    """

    def product(left: Any, right: Any, dtype: Any) -> Any:
        sums = np.zeros((left.shape[0], right.shape[1]), dtype)
        for k in range(left.shape[1]):
            sums += left[:, k, None].astype(dtype) * right[None, k].astype(dtype)
        return sums

    names = SimpleNamespace(**{**vars(np), "matmul": product})
    monkeypatch.setattr("triton.runtime.interpreter.np", names)


@pytest.mark.usefixtures("row_by_row")
@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, "float32"),
        (EVERYTHING, "float32"),
        (EVERYTHING, "float16"),
        (EVERYTHING, "bfloat16"),
        ({"cache_dtype": "float8_e4m3fn"}, "bfloat16"),
    ],
)
def test_a_row_has_the_same_bits_alone_batched_and_in_chunks(
    changes: dict[str, Any], dtype: str
) -> None:
    shape = attention_shape(**{"dtype": dtype, **changes})
    lengths = [45, 30, 1, 36]
    histories = Histories(shape, lengths)
    whole = run(histories.step([(i, 0, length) for i, length in enumerate(lengths)]))
    rows = dict(enumerate(torch.split(whole, lengths)))
    for sequence, length in enumerate(lengths):
        alone = run(histories.step([(sequence, 0, length)]))
        assert torch.equal(alone, rows[sequence])
    mixed = [(3, 35, 1), (1, 12, 18), (0, 40, 5), (2, 0, 1)]
    output = torch.split(run(histories.step(mixed)), [count for _, _, count in mixed])
    for (sequence, start, count), part in zip(mixed, output, strict=True):
        assert torch.equal(part, rows[sequence][start : start + count])
    cache = histories.empty_cache()
    chunks = [run(histories.step([(0, start, 15)], cache)) for start in range(0, 45, 15)]
    assert torch.equal(torch.cat(chunks), rows[0])


class FakeWrapper:
    """FlashInfer's wrapper by its documentation: pages in CSR form, plain attention."""

    def __init__(self, workspace: Tensor, kv_layout: str) -> None:
        assert kv_layout == "HND"
        assert workspace.dtype == torch.uint8

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        **options: Any,
    ) -> None:
        lists = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(tensor.dtype == torch.int32 for tensor in lists)
        self.starts, self.page_starts, self.pages, self.last = (x.tolist() for x in lists)
        self.group, self.page_size, self.options = num_qo_heads // num_kv_heads, page_size, options
        assert head_dim_qk == 64

    def run(self, query: Tensor, kv_cache: Tensor, out: Tensor) -> None:
        options = self.options
        for i, last in enumerate(self.last):
            assert 1 <= last <= self.page_size
            pages = self.pages[self.page_starts[i] : self.page_starts[i + 1]]
            length = (len(pages) - 1) * self.page_size + last
            key, value = (
                kv_cache[pages, plane].transpose(0, 1).flatten(1, 2)[:, :length].float()
                for plane in (0, 1)
            )  # [Hkv, length, D]
            rows = query[self.starts[i] : self.starts[i + 1]].float()
            for j in range(len(rows)):
                position = length - len(rows) + j
                end = position + 1 if options["causal"] else length
                left = options["window_left"]
                first = max(0, position - left) if left >= 0 else 0
                for head in range(query.shape[1]):
                    keys = key[head // self.group, first:end]
                    scores = keys @ rows[j, head] * options["sm_scale"]
                    if cap := options["logits_soft_cap"]:
                        scores = cap * torch.tanh(scores / cap)
                    weights = scores.softmax(0)
                    out[self.starts[i] + j, head] = weights @ value[head // self.group, first:end]


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = FakeWrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(module, "__spec__", object())


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_flashinfer_is_told_the_same_step(window: int, softcap: float) -> None:
    shape = attention_shape(
        head_size=64, value_head_size=64, dtype="float16", sliding_window=window, softcap=softcap
    )
    assert prefer.why_not(shape) is None
    histories = Histories(shape, [33, 5, 16, 7])
    step = histories.step([(0, 32, 1), (1, 5, 0), (2, 0, 16), (3, 3, 4)])
    expected = step.reference()
    planned = prefer.FlashInferAttention(shape, step.query.device)
    planned.plan(step.block_tables, step.query_start_loc, step.prefix_offsets)
    actual = prefer.paged_attention_(*step.operands, shape, planned)
    torch.testing.assert_close(actual.float(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.usefixtures("flashinfer")
def test_why_flashinfer_is_not_used() -> None:
    fits = attention_shape(head_size=128, value_head_size=128, dtype="bfloat16")
    assert prefer.why_not(fits) is None
    for changes, word in (
        ({"has_sinks": True}, "sinks"),
        ({"has_alibi": True}, "ALiBi"),
        ({"value_head_size": 64}, "128 and 64"),
        ({"head_size": 80, "value_head_size": 80}, "heads of 80"),
        ({"dtype": "float32", "cache_dtype": "float32"}, "float32"),
        ({"cache_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ):
        reason = prefer.why_not(replace(fits, **changes))
        assert reason is not None
        assert word in reason


def test_flashinfer_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reason = prefer.why_not(attention_shape(head_size=64, value_head_size=64, dtype="float16"))
    assert reason is not None
    assert "not installed" in reason
