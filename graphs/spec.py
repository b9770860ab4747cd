"""The frozen description of a model that an engine carries and the runtime reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from octavo.graphs import bindings
from octavo.graphs.bindings import Binding, DType

FloatDType = Literal["float32", "float16", "bfloat16"]
CacheDType = FloatDType | Literal["int8", "float8_e4m3fn"]
Quantization = Literal["none", "int8", "int4"]
Device = Literal["cpu", "cuda"]
SpeculativeMethod = Literal[
    "ngram", "draft_model", "medusa", "eagle", "eagle3", "mlp_speculator", "mtp"
]


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AttentionSpec(Frozen):
    """One attention layer as the captured graph calls `octavo::paged_attention`."""

    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    value_head_dim: int = Field(ge=1)
    scale: float
    causal: bool = True
    sliding_window: int = Field(default=0, ge=0, description="visible keys, 0 = all")
    softcap: float = Field(default=0.0, ge=0.0, description="0 = none")
    has_sinks: bool = False
    has_alibi: bool = False

    @model_validator(mode="after")
    def _heads_divide(self) -> AttentionSpec:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        return self

    @property
    def cache_row_size(self) -> int:
        """Elements of one token's row in the cache: keys and values share the larger head size."""
        return max(self.head_dim, self.value_head_dim)

    def block_bytes(self, block_size: int, dtype: DType) -> int:
        """Bytes that one cache block takes in this layer, the scales of an int8 cache included."""
        rows = 2 * self.num_kv_heads * block_size
        scale_bytes = DTYPE_BYTES["float32"] if dtype == "int8" else 0
        return rows * (self.cache_row_size * DTYPE_BYTES[dtype] + scale_bytes)


class HiddenStatesSpec(Frozen):
    """What a graph returns of its hidden states, f32 [R, size], for drafters to read.

    rows    "logits": of the rows of the logits, R = L; "all": of every token of the step, R = T
    source  "post_norm": what the output embedding reads; "pre_norm": the same before the final
            norm; "layers": what goes into the decoder layers `layers`, concatenated and projected;
            "chain": what a drafter reads as the feature of its next step
    """

    rows: Literal["logits", "all"]
    source: Literal["post_norm", "pre_norm", "layers", "chain"]
    layers: tuple[int, ...] = ()
    size: int = Field(ge=1)

    @property
    def binding(self) -> Binding:
        return bindings.hidden_states(self.rows, self.size)


class ModelSpec(Frozen):
    """What the runtime must know of a model; `layers` holds its attention layers in cache order.

    A drafter that needs no cache has no layers, and gives `drafts_per_row` rows of logits for every
    token; `feature_size` is that of the hidden states of its target that a drafter reads, 0 for
    none.
    """

    architecture: str
    model_type: str
    vocab_size: int = Field(ge=1, description="columns of the logits")
    hidden_size: int = Field(ge=1)
    max_position_embeddings: int = Field(ge=1)
    tie_word_embeddings: bool
    layers: tuple[AttentionSpec, ...]
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    num_parameters: int = Field(ge=0)
    # Ids from this one on are padding rows of the embedding: they are never sampled.
    sampled_vocab_size: int = Field(ge=1)
    hidden_states: HiddenStatesSpec | None = None
    feature_size: int = Field(default=0, ge=0)
    drafts_per_row: int = Field(default=1, ge=1)

    @property
    def output_bindings(self) -> tuple[Binding, ...]:
        """What the graph returns beside its changed caches."""
        logits = bindings.logits(self.vocab_size)
        return (logits,) if self.hidden_states is None else (logits, self.hidden_states.binding)

    def cache_block_bytes(self, block_size: int, dtype: DType) -> int:
        """Bytes that one cache block takes over all layers."""
        return sum(layer.block_bytes(block_size, dtype) for layer in self.layers)

    def kv_cache_bindings(self, block_size: int, dtype: CacheDType) -> Iterator[Binding]:
        """Every layer's cache, then every layer's scales if the cache is of int8."""
        for index, layer in enumerate(self.layers):
            yield bindings.kv_cache(
                index, layer.num_kv_heads, block_size, layer.cache_row_size, dtype
            )
        if dtype == "int8":
            for index, layer in enumerate(self.layers):
                yield bindings.kv_scales(index, layer.num_kv_heads, block_size)


class PassRecord(Frozen):
    """What one graph pass did: how often it matched, how, and what it left alone and why."""

    name: str
    matches: int = Field(ge=0)
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


DTYPE_BYTES: dict[str, int] = {
    "int32": 4,
    "int8": 1,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
}
