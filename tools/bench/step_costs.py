"""Steps of a given shape, and what a dense model has to read and to multiply in one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.backends.base import Int32Array, StepInputs
from octavo.graphs.spec import DTYPE_BYTES, FloatDType, ModelSpec


@dataclass(frozen=True)
class Step:
    """Sequences of one length, each with its last `tokens` in this step."""

    name: str
    sequences: int
    prefix: int  # tokens of each sequence that are in the cache already
    tokens: int

    @property
    def rows(self) -> int:
        return self.sequences * self.tokens

    def blocks_per_sequence(self, block_size: int) -> int:
        return -(-(self.prefix + self.tokens) // block_size)

    def inputs(self, vocab_size: int, block_size: int) -> StepInputs:
        """Random tokens, blocks in order, the logits of each sequence's last token."""
        width = self.blocks_per_sequence(block_size)
        tables = np.arange(self.sequences * width).reshape(self.sequences, width)
        at = np.arange(self.prefix, self.prefix + self.tokens)
        slots = tables[:, at // block_size] * block_size + at % block_size
        ends = np.arange(1, self.sequences + 1) * self.tokens
        return StepInputs(
            token_ids=_int32(np.random.default_rng(0).integers(vocab_size, size=self.rows)),
            positions=_int32(np.tile(at, self.sequences)),
            slot_mapping=_int32(slots.reshape(-1)),
            block_tables=_int32(tables),
            query_start_loc=_int32(np.concatenate([[0], ends])),
            prefix_offsets=_int32(np.full(self.sequences, self.prefix)),
            logits_indices=_int32(ends - 1),
        )

    def bytes_read(self, model: Model) -> int:
        """Of weights and of cached keys and values."""
        positions = self.sequences * (self.prefix + self.tokens)
        return model.weight_bytes + positions * model.bytes_per_position

    def flops(self, model: Model) -> int:
        """Of the products with weights and of causal attention, a multiply-add counting as two."""
        visible = sum(range(self.prefix + 1, self.prefix + self.tokens + 1))
        weights = model.body_elements * self.rows + model.head_elements * self.sequences
        attention = model.attention_products * visible * self.sequences
        return 2 * (weights + attention)


@dataclass(frozen=True)
class Model:
    """What a step of a dense model reads and multiplies; elements of the matrices it applies."""

    body_elements: int
    head_elements: int  # of the output embedding
    attention_products: int  # multiply-adds of a query token for each key that it sees
    weight_bytes: int
    bytes_per_position: int  # of keys and values in all layers

    @classmethod
    def of(cls, spec: ModelSpec, dtype: FloatDType) -> Model:
        """`num_parameters` counts vectors too, which are next to nothing."""
        size = DTYPE_BYTES[dtype]
        head = spec.vocab_size * spec.hidden_size
        embeddings = head if spec.tie_word_embeddings else 2 * head
        body = spec.num_parameters - embeddings
        products = sum(one.num_heads * (one.head_dim + one.value_head_dim) for one in spec.layers)
        return cls(body, head, products, size * (body + head), spec.cache_block_bytes(1, dtype))


def _int32(array: Any) -> Int32Array:
    return np.ascontiguousarray(array, np.int32)
