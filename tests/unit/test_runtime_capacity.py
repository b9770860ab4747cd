"""Memory budgets and lowered limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.backends.bundle import read_manifest
from octavo.graphs.errors import CapacityError, RequestError
from octavo.runtime.capacity import EngineLimits, parse_memory, resolve_limits


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("512MiB", 512 << 20),
        ("1GiB", 1 << 30),
        ("300MB", 300_000_000),
        ("1.5 kb", 1500),
        ("2048", 2048),
        (77, 77),
        (" 3 TiB ", 3 << 40),
    ],
)
def test_sizes(value: str | int, size: int) -> None:
    assert parse_memory(value) == size


@pytest.mark.parametrize("value", ["lots", "", "12 parsecs", "-5MiB", 0, -1, True, None, 1.5, "0B"])
def test_sizes_that_are_none(value: Any) -> None:
    with pytest.raises(RequestError, match="kv_cache_memory is"):
        parse_memory(value)


def resolve(engine: Path, **options: Any) -> EngineLimits:
    defaults: dict[str, Any] = {
        "kv_cache_memory": "512MiB",
        "num_kv_blocks": None,
        "max_num_seqs": None,
        "max_num_batched_tokens": None,
    }
    return resolve_limits(read_manifest(engine), **{**defaults, **options})


def test_the_pool_is_what_the_budget_holds(null_engine: Path) -> None:
    # 2 rows (key, value) x 1 head x 16 tokens x 2 elements x 4 bytes = 256 bytes a block.
    assert resolve(null_engine, kv_cache_memory=256 * 10 + 255).num_kv_blocks == 10
    assert resolve(null_engine, kv_cache_memory="1KiB").num_kv_blocks == 4


def test_a_block_of_int8_counts_its_scales(null_engine: Path) -> None:
    manifest = read_manifest(null_engine).model_copy(update={"kv_cache_dtype": "int8"})
    # 2 rows x 1 head x 16 tokens x (2 elements of 1 byte and a scale of 4) = 192 bytes a block.
    assert manifest.cache_block_bytes == 192
    options: dict[str, Any] = {"num_kv_blocks": None, "max_num_seqs": None}
    limits = resolve_limits(
        manifest, kv_cache_memory=192 * 10 + 191, max_num_batched_tokens=None, **options
    )
    assert limits.num_kv_blocks == 10


def test_the_pool_is_no_larger_than_all_sequences_can_use(null_engine: Path) -> None:
    assert resolve(null_engine).num_kv_blocks == 8 * 256 // 16
    assert resolve(null_engine, max_num_seqs=2).num_kv_blocks == 2 * 256 // 16
    assert resolve(null_engine, num_kv_blocks=1000).num_kv_blocks == 1000


def test_a_budget_below_one_block_is_refused_with_the_numbers(null_engine: Path) -> None:
    with pytest.raises(
        CapacityError, match=r"of 255 bytes holds no cache block: .* needs 256 bytes"
    ):
        resolve(null_engine, kv_cache_memory=255)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens"])
def test_limits_may_be_lowered_and_not_raised(null_engine: Path, name: str) -> None:
    limit = getattr(read_manifest(null_engine).limits, name)
    assert getattr(resolve(null_engine, **{name: 3}), name) == 3
    assert getattr(resolve(null_engine, **{name: limit}), name) == limit
    with pytest.raises(CapacityError, match=f"{name} is {limit + 1}, .* at most {limit}"):
        resolve(null_engine, **{name: limit + 1})


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "num_kv_blocks"])
@pytest.mark.parametrize("value", [0, -1, True, "4", 2.0])
def test_limits_are_positive_integers(null_engine: Path, name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{name} is {value!r}, it must be an integer"):
        resolve(null_engine, **{name: value})
