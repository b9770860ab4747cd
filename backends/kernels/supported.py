"""What the native kernels offer to the backends that run them on CPUs."""

from __future__ import annotations

from octavo.backends import host
from octavo.backends.base import EngineKind
from octavo.graphs.errors import BuildError
from octavo.graphs.ops.activation import ACTIVATE, ACTIVATE_QUANTIZE
from octavo.graphs.ops.fused_paged_attention import INT8_SCHEMA as FUSED_ATTENTION_INT8
from octavo.graphs.ops.fused_paged_attention import SCHEMA as FUSED_ATTENTION
from octavo.graphs.ops.linear import LINEAR_RESIDUAL
from octavo.graphs.ops.norm import NORM, NORM_QUANTIZE
from octavo.graphs.ops.quantization import SCHEMA as QUANTIZE
from octavo.graphs.ops.quantized_linear import SCHEMA as QUANTIZED_LINEAR

OPERATORS = frozenset(
    schema.name
    for schema in (
        ACTIVATE,
        ACTIVATE_QUANTIZE,
        FUSED_ATTENTION,
        FUSED_ATTENTION_INT8,
        LINEAR_RESIDUAL,
        NORM,
        NORM_QUANTIZE,
        QUANTIZE,
        QUANTIZED_LINEAR,
    )
)
# The attention kernels keep a block's keys in columns of 16.
BLOCK_SIZE_MULTIPLE = 16


def require(backend: str, kind: EngineKind, block_size: int) -> None:
    """Raises BuildError for dtypes and block sizes without kernels."""
    host.refuse_fp8(backend, kind)
    if kind.dtype != "float32":
        raise BuildError(
            f"the {backend} backend computes in float32 on a CPU, not in {kind.dtype}: "
            "build with --dtype float32"
        )
    if block_size % BLOCK_SIZE_MULTIPLE:
        raise BuildError(
            f"block_size {block_size} is not a multiple of "
            f"{BLOCK_SIZE_MULTIPLE}, which the attention kernel needs: build with "
            f"--block-size {BLOCK_SIZE_MULTIPLE}"
        )
