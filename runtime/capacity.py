"""How much an engine may hold at once: its limits, as lowered by the user, and its pool."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.graphs.errors import CapacityError, RequestError
from octavo.runtime import positions

if TYPE_CHECKING:
    from octavo.backends.manifest import Manifest

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


@dataclass(frozen=True)
class EngineLimits:
    """What the runtime keeps to: the manifest's limits or lower ones, and the pool's size."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_kv_blocks: int

    @property
    def max_blocks_per_seq(self) -> int:
        return positions.blocks_for(self.max_model_len, self.block_size)


def parse_memory(value: str | int, name: str = "kv_cache_memory") -> int:
    """Bytes of `512MiB`, `1.5 GB` or a plain number; otherwise a RequestError with `name`."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        unit = _UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None:
            raise RequestError(
                f"{name} is {value!r}, it must be a number of bytes or a text such as "
                "'512MiB' or '1GB'"
            )
        size = int(float(match[1]) * unit)
    if size < 1:
        raise RequestError(f"{name} is {value!r}, it must be at least 1 byte")
    return size


def resolve_limits(
    manifest: Manifest,
    *,
    kv_cache_memory: str | int,
    num_kv_blocks: int | None,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    drafter_block_bytes: int = 0,
) -> EngineLimits:
    """Lowers the engine's limits; CapacityError if one would be raised or nothing fits.

    `drafter_block_bytes`: what drafters store beside each block of the engine.
    """
    engine = manifest.limits
    max_num_seqs = _lowered("max_num_seqs", max_num_seqs, engine.max_num_seqs)
    return EngineLimits(
        max_model_len=engine.max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=_lowered(
            "max_num_batched_tokens", max_num_batched_tokens, engine.max_num_batched_tokens
        ),
        block_size=engine.block_size,
        num_kv_blocks=_num_blocks(
            manifest, drafter_block_bytes, kv_cache_memory, num_kv_blocks, max_num_seqs
        ),
    )


def _lowered(name: str, value: int | None, limit: int) -> int:
    if value is None:
        return limit
    check_positive(name, value)
    if value > limit:
        raise CapacityError(
            f"{name} is {value}, the engine was built for at most {limit}: "
            f"lower it or build the engine with a larger {name}"
        )
    return value


def _num_blocks(
    manifest: Manifest,
    drafter_block_bytes: int,
    kv_cache_memory: str | int,
    num_kv_blocks: int | None,
    max_num_seqs: int,
) -> int:
    if num_kv_blocks is not None:
        check_positive("num_kv_blocks", num_kv_blocks)
        return num_kv_blocks
    budget = parse_memory(kv_cache_memory)
    block_bytes = manifest.cache_block_bytes + drafter_block_bytes
    if budget < block_bytes:
        raise CapacityError(
            f"kv_cache_memory of {budget} bytes holds no cache block: one block of "
            f"{manifest.limits.block_size} tokens needs {block_bytes} bytes and a sequence of the "
            f"full length {manifest.limits.max_blocks_per_seq * block_bytes}; raise kv_cache_memory"
        )
    # More blocks than every sequence at its full length needs would only lie idle.
    return min(budget // block_bytes, max_num_seqs * manifest.limits.max_blocks_per_seq)


def check_positive(name: str, value: object) -> None:
    """Raises RequestError unless `value` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(f"{name} is {value!r}, it must be an integer of at least 1")
