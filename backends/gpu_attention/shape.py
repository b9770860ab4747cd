"""What the kernels are specialised for: one attention layer's sizes, attributes and dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from octavo.graphs.errors import BuildError
from octavo.graphs.spec import FloatDType

GpuCacheDType = FloatDType | Literal["float8_e4m3fn"]


@dataclass(frozen=True)
class AttentionShape:
    """Raises BuildError for sizes that no kernel can be made for."""

    num_heads: int
    num_kv_heads: int
    head_size: int  # of queries and keys
    value_head_size: int
    block_size: int  # tokens a cache block holds
    scale: float
    causal: bool
    sliding_window: int  # keys a token sees, itself included; 0: all
    softcap: float  # 0: none
    has_sinks: bool
    has_alibi: bool
    dtype: FloatDType
    cache_dtype: GpuCacheDType

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_size", "value_head_size", "block_size"):
            if (size := getattr(self, name)) < 1:
                raise BuildError(f"attention needs {name} of at least 1, not {size}: correct it")
        if self.num_heads % self.num_kv_heads:
            raise BuildError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads "
                "evenly: give a multiple"
            )
        for name in ("sliding_window", "softcap"):
            if (value := getattr(self, name)) < 0:
                raise BuildError(f"{name} is {value}: give 0 for none, or a positive number")
        if self.dtype not in get_args(FloatDType):
            raise BuildError(
                f"attention on GPUs has no dtype {self.dtype!r}: give one of "
                f"{', '.join(get_args(FloatDType))}"
            )
        if self.cache_dtype not in (self.dtype, "float8_e4m3fn"):
            raise BuildError(
                f"a cache of {self.cache_dtype!r} does not go with {self.dtype}: give "
                f"{self.dtype} or float8_e4m3fn"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def row_size(self) -> int:
        """Elements of a token's row in the cache, [N, 2, Hkv, block_size, row_size]."""
        return max(self.head_size, self.value_head_size)

    @property
    def element_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def cache_bytes(self) -> int:
        return 1 if self.cache_dtype == "float8_e4m3fn" else self.element_bytes
