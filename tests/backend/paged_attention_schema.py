"""`com.microsoft::PagedAttention` in numpy, written from the operator's documentation alone, and
ONNX's evaluator with it: what ONNX Runtime computes on CUDA, computed here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from octavo.backends.base import StepInputs
from tests.backend.steps import Part, pack

Array = NDArray[Any]


def paged_attention(
    query: Array,  # [T, H * D]
    key: Array,  # [T, Hkv * D]
    value: Array,  # [T, Hkv * D]
    key_cache: Array,  # [N, block_size, Hkv, D], changed in place
    value_cache: Array,
    cumulative_sequence_length: Array,  # [B+1]
    past_seqlens: Array,  # [B]
    block_table: Array,  # [B, M]
    slot_mapping: Array,  # [T]
    head_sink: Array | None,  # [H]
    *,
    num_heads: int,
    kv_num_heads: int,
    scale: float,
    softcap: float,
    local_window_size: int,
) -> Array:  # [T, H * D]
    block_size, head_size = key_cache.shape[1], key_cache.shape[3]
    for token, slot in enumerate(slot_mapping):
        if slot >= 0:
            place = divmod(int(slot), block_size)
            key_cache[place] = key[token].reshape(kv_num_heads, head_size)
            value_cache[place] = value[token].reshape(kv_num_heads, head_size)
    output = np.zeros_like(query)
    for sequence, past in enumerate(past_seqlens):
        first, end = cumulative_sequence_length[sequence : sequence + 2]
        for token in range(first, end):
            position = int(past) + token - int(first)
            start = max(0, position - local_window_size + 1) if local_window_size > 0 else 0
            seen = np.arange(start, position + 1)
            places = (block_table[sequence, seen // block_size], seen % block_size)
            keys, values = key_cache[places].astype(float), value_cache[places].astype(float)
            for head in range(num_heads):
                kv_head = head * kv_num_heads // num_heads
                columns = slice(head * head_size, (head + 1) * head_size)
                scores = keys[:, kv_head] @ query[token, columns].astype(float) * scale
                if softcap > 0:
                    scores = softcap * np.tanh(scores / softcap)
                sink = -np.inf if head_sink is None else float(head_sink[head])
                top = max(scores.max(), sink)
                weights = np.exp(scores - top)
                total = weights.sum() + np.exp(sink - top)
                output[token, columns] = weights @ values[:, kv_head] / total
    return output


class PagedAttention(OpRun):
    op_domain = "com.microsoft"

    def _run(self, *inputs: Any, **attributes: Any) -> tuple[Array, Array, Array]:
        query, key, value, key_cache, value_cache, starts, past, table = inputs[:8]
        rest = [*inputs[8:], *[None] * 9]
        caches = key_cache.copy(), value_cache.copy()
        names = ("num_heads", "kv_num_heads", "scale", "softcap", "local_window_size")
        output = paged_attention(
            query,
            key,
            value,
            *caches,
            starts,
            past,
            table,
            rest[2],
            rest[3],
            **{name: attributes[name] for name in names},
        )
        return output, *caches


class Evaluated:
    """An engine for CUDA, run by ONNX's evaluator on float16 caches of `num_blocks` blocks."""

    def __init__(self, bundle: Path, num_blocks: int) -> None:
        model = onnx.load(bundle / "model.onnx")
        self._evaluator = ReferenceEvaluator(model, new_ops=[PagedAttention])
        shapes = {
            value.name: [one.dim_value for one in value.type.tensor_type.shape.dim]
            for value in model.graph.input
        }
        self._inputs = list(shapes)
        self._outputs = [value.name for value in model.graph.output]
        self.block_size = shapes["key_cache.0"][1]
        self.caches = {
            name: np.zeros([num_blocks, *shape[1:]], np.float16)
            for name, shape in shapes.items()
            if "_cache." in name
        }

    def run(self, inputs: StepInputs) -> dict[str, Array]:
        """Every output that is no cache."""
        feeds = {name: getattr(inputs, name) for name in self._inputs if hasattr(inputs, name)}
        if "attention_metadata" in self._inputs:
            feeds["attention_metadata"] = np.zeros(3, np.int32)  # bounds of 0 are unknown ones
        found = dict(
            zip(self._outputs, self._evaluator.run(None, feeds | self.caches), strict=True)
        )
        self.caches = {name: found.pop(name.replace(".", "_out.")) for name in self.caches}
        return found

    def logits(self, parts: list[Part]) -> Array:
        logits: Array = self.run(pack(parts, self.block_size))["logits"]
        return logits
