"""Steps of the fused attention ops, on top of those of the plain one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.graphs.ops import paged_attention
from octavo.graphs.ops.fused_paged_attention import INT8_SCHEMA, SCHEMA
from tests.backend.attention_steps import (
    Attention,
    Chunk,
    Floats,
    History,
    PagedRun,
    open_session,
)

Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Fused(Attention):
    rotary: int = 16  # R; 0: none
    interleaved: bool = False
    query_norm: bool = False
    key_norm: bool = False
    epsilon: float = 1e-2

    @property
    def attributes(self) -> dict[str, Any]:
        return {
            **super().attributes,
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "head_size": self.key_size,
            "interleaved": int(self.interleaved),
            "norm_epsilon": self.epsilon,
        }

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (self.heads * self.value_size,)

    @property
    def query_weight(self) -> Floats:
        return np.linspace(0.5, 1.5, self.key_size * self.query_norm, dtype=np.float32)

    @property
    def key_weight(self) -> Floats:
        return np.linspace(-1.2, 0.8, self.key_size * self.key_norm, dtype=np.float32)


GROUPED = Fused(heads=9, kv_heads=3, key_size=64, value_size=64, rotary=64)
EVERYTHING = Fused(
    heads=6, kv_heads=3, key_size=40, value_size=24, block_size=32, sliding_window=45,
    softcap=3.0, sinks=True, alibi=True, rotary=20, query_norm=True, key_norm=True,
)  # fmt: skip
CASES = {
    "grouped": GROUPED,
    "normed": replace(GROUPED, query_norm=True, key_norm=True),
    "query_norm_only": Fused(query_norm=True),
    "key_norm_only": Fused(key_norm=True, rotary=0),
    "nothing": Fused(rotary=0),
    "partial": Fused(key_size=80, value_size=80, rotary=32),
    "partial_odd": Fused(key_size=37, value_size=41, rotary=22, query_norm=True, key_norm=True),
    "one_pair": Fused(key_size=3, value_size=2, rotary=2),
    "interleaved": Fused(key_size=64, value_size=64, rotary=64, interleaved=True),
    "interleaved_partial": Fused(key_size=29, value_size=16, rotary=14, interleaved=True),
    "head_size_512": Fused(
        heads=2, kv_heads=1, key_size=512, value_size=512, rotary=512, scale=0.04, key_norm=True
    ),
    "wide_group": Fused(heads=130, kv_heads=1, key_size=8, value_size=8, rotary=8),
    "wide_value": Fused(key_size=12, value_size=100, rotary=12),
    "bidirectional": Fused(causal=False),
    "block_48": Fused(block_size=48),
    "everything": EVERYTHING,
    "everything_interleaved": replace(EVERYTHING, interleaved=True),
}


@dataclass(frozen=True)
class PackedHistory(History):
    """Heads as the projection leaves them, and each token's rotation."""

    cos: Floats  # [L, R]; of any size, so that an element is told from its partner
    sin: Floats  # [L, R]

    @staticmethod
    def random(spec: Attention, length: int, seed: int) -> PackedHistory:
        assert isinstance(spec, Fused)
        heads = History.random(spec, length, seed)
        rotation = np.random.default_rng(seed + 1).uniform(-1, 1, (2, length, spec.rotary))
        return PackedHistory(heads.query, heads.key, heads.value, *rotation.astype(np.float32))


def normed(x: Doubles, weight: Floats, epsilon: float) -> Doubles:
    if not len(weight):
        return x
    mean_square: Doubles = np.mean(x**2, axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + epsilon) * weight


def turned(spec: Fused, x: Doubles, cos: Floats, sin: Floats) -> Doubles:
    """[L, heads, Dk], pair by pair."""
    y = x.copy()
    half = spec.rotary // 2
    for pair in range(half):
        i, j = (2 * pair, 2 * pair + 1) if spec.interleaved else (pair, pair + half)
        y[..., i] = x[..., i] * cos[:, None, i] - x[..., j] * sin[:, None, i]
        y[..., j] = x[..., j] * cos[:, None, j] + x[..., i] * sin[:, None, j]
    return y


def prepared(spec: Fused, history: PackedHistory) -> History:
    """Queries and keys as attention takes them, in float64."""
    query = normed(history.query.astype(np.float64), spec.query_weight, spec.epsilon)
    key = normed(history.key.astype(np.float64), spec.key_weight, spec.epsilon)
    query, key = (turned(spec, x, history.cos, history.sin) for x in (query, key))
    heads: Any = (query, key, history.value)  # float64, where a history has float32
    return History(*heads)


@dataclass
class FusedRun(PagedRun):
    """Steps of the op over a cache of float32."""

    def token_feeds(self, chunks: Sequence[Chunk]) -> dict[str, NDArray[Any]]:
        spec = self.spec
        assert isinstance(spec, Fused)
        heads = [self.gather(name, chunks) for name in ("query", "key", "value")]
        rotation = {
            name: self.gather(name, chunks) if spec.rotary else np.zeros((0, 0), np.float32)
            for name in ("cos", "sin")
        }
        return {
            "qkv": np.concatenate([x.reshape(len(x), x.shape[1] * x.shape[2]) for x in heads], 1),
            **rotation,
            "query_norm": spec.query_weight,
            "key_norm": spec.key_weight,
        }

    def stored(self, sequence: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys [L, Hkv, Dk] and values [L, Hkv, Dv] as they lie in the cache."""
        spec = self.spec
        length = len(self.histories[sequence].query)
        slots = self.slots(sequence, np.arange(length, dtype=np.int32))
        blocks, offsets = slots // spec.block_size, slots % spec.block_size
        n, _, heads, size, width = self.cache.shape
        keys = self.cache.reshape(n, 2, heads, width, size)[blocks, 0, :, : spec.key_size, offsets]
        return keys, self.cache[blocks, 1, :, offsets, : spec.value_size]


@dataclass
class Int8Run(FusedRun):
    """Steps over a cache of integers, with scales that are NaN where nothing was written."""

    scales: Floats = field(init=False)

    def allocate(self, num_blocks: int) -> None:
        super().allocate(num_blocks)
        shape = self.cache.shape
        rng = np.random.default_rng(self.seed)
        self.cache = rng.integers(-128, 128, shape).astype(np.int8)
        self.scales = np.full(shape[:-1], np.nan, np.float32)

    def cache_feeds(self) -> dict[str, NDArray[Any]]:
        return {"kv_cache": self.cache, "kv_scales": self.scales}

    def stored_scales(self, sequence: int) -> tuple[Floats, Floats]:
        """Of keys and values, [L, Hkv]."""
        length = len(self.histories[sequence].query)
        slots = self.slots(sequence, np.arange(length, dtype=np.int32))
        size = self.spec.block_size
        keys, values = (self.scales[slots // size, plane, :, slots % size] for plane in (0, 1))
        return keys, values

    def read_back(self, sequence: int) -> tuple[Doubles, Doubles]:
        """Keys and values as attention reads them: scale * integer."""
        pairs = zip(self.stored(sequence), self.stored_scales(sequence), strict=True)
        keys, values = (x * scales[..., None].astype(np.float64) for x, scales in pairs)
        return keys, values


@dataclass(frozen=True)
class Variant:
    """One instruction set's build of the kernels."""

    name: str

    def run(
        self,
        spec: Fused,
        histories: Sequence[PackedHistory],
        *,
        int8: bool = False,
        threads: int = 1,
        seed: int = 0,
    ) -> FusedRun:
        run, schema = (Int8Run, INT8_SCHEMA) if int8 else (FusedRun, SCHEMA)
        session = open_session(self.name, schema, spec.attributes, threads)
        return run(session, spec, histories, seed)

    def int8_run(self, spec: Fused, histories: Sequence[PackedHistory]) -> Int8Run:
        run = self.run(spec, histories, int8=True)
        assert isinstance(run, Int8Run)
        return run

    def plain_run(self, spec: Fused, histories: Sequence[History]) -> PagedRun:
        plain = Attention(**{f.name: getattr(spec, f.name) for f in fields(Attention)})
        session = open_session(self.name, paged_attention.SCHEMA, plain.attributes)
        return PagedRun(session, plain, histories)


both_caches = pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])


def mixed_batch(run: FusedRun) -> list[tuple[Chunk, Floats]]:
    """Prefill, decode, verification, an idle sequence and a chunk, behind prefixes."""
    run.step(Chunk(1, 0, 70), Chunk(2, 0, 20), Chunk(4, 0, 64))
    chunks = [Chunk(0, 0, 37), Chunk(1, 70, 1), Chunk(2, 20, 5), Chunk(3, 0, 0), Chunk(4, 64, 64)]
    return list(zip(chunks, run.step(*chunks), strict=True))


LENGTHS = (37, 71, 25, 33, 128)


def random_histories(spec: Fused, lengths: Sequence[int] = LENGTHS) -> list[PackedHistory]:
    return [PackedHistory.random(spec, length, length) for length in lengths]
