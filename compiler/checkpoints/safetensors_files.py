"""Checks safetensors files against their own headers before anything is loaded.

The format: a u64 length, that many bytes of JSON (name -> dtype, shape, data_offsets), data.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Set
from pathlib import Path
from typing import Any

from octavo.graphs.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_HEADER_LIMIT = 100_000_000  # what the safetensors library accepts
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")


def weight_files(folder: Path, named: str | None = None) -> tuple[Path, ...]:
    """The index, if there is one, and every weight file of a folder, each one checked.

    `named` is the file that `config.json` names as `transformers_weights`.
    """
    if any(_DISTRIBUTED.fullmatch(path.name) for path in folder.glob("shard-*.safetensors")):
        raise CheckpointError(
            f"{folder} holds shards of a distributed training run: consolidate them into {SINGLE}"
        )
    first = _first_file(folder, named)
    if first.suffix == ".json":
        return (first, *_check_index(first))
    check_safetensors(first)
    return (first,)


def check_safetensors(path: Path) -> Set[str]:
    """Compares header and data with the file's size; returns the names of its tensors."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 0 < length <= min(size - 8, _HEADER_LIMIT):
                raise _damaged(path, f"its header should take {length} of {size} bytes")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise _damaged(path, "its header is no JSON") from None
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no JSON object")
    header.pop("__metadata__", None)
    end = max((_tensor_end(path, name, entry) for name, entry in header.items()), default=0)
    if end != size - 8 - length:
        raise _damaged(path, f"its tensors take {end} bytes, the file has {size - 8 - length}")
    return header.keys()


def dtypes(path: Path) -> Set[str]:
    """The format's names of the dtypes that a checked file holds."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}


def _first_file(folder: Path, named: str | None) -> Path:
    for name in (named,) if named else (SINGLE, INDEX):
        if Path(name).name == name and (folder / name).is_file():
            if not name.endswith((".safetensors", ".safetensors.index.json")):
                raise CheckpointError(
                    f"{folder} keeps its weights in {name}, only safetensors are read: convert it"
                )
            return folder / name
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder} holds its weights only as pickles ({pickles[0]}), which can run code "
            "and are never loaded: convert them to safetensors, for instance with `save_pretrained`"
        )
    raise CheckpointError(
        f"{folder} has no {named or f'{SINGLE} or {INDEX}'}: download the checkpoint's weights"
    )


def _check_index(index: Path) -> tuple[Path, ...]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        by_shard: dict[str, list[str]] = {}
        for tensor, shard in weight_map.items():
            by_shard.setdefault(str(shard), []).append(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is damaged ({type(error).__name__}: {error}): download it again"
        ) from None
    return tuple(_check_shard(index, shard, by_shard[shard]) for shard in sorted(by_shard))


def _check_shard(index: Path, shard: str, tensors: list[str]) -> Path:
    path = index.parent / shard
    if Path(shard).name != shard or path.suffix != ".safetensors":
        raise CheckpointError(f"{index} names {shard!r}, which is no safetensors file beside it")
    if not path.is_file():
        raise CheckpointError(f"{index} names the shard {shard}, which is missing: download it")
    absent = sorted(set(tensors) - check_safetensors(path))
    if absent:
        raise CheckpointError(
            f"{path} lacks {len(absent)} of {len(tensors)} tensors that {index.name} places in it "
            f"(first {absent[0]}): download it again"
        )
    return path


def _tensor_end(path: Path, name: str, entry: Any) -> int:
    """Where a tensor's data ends, from the start of the data."""
    try:
        start, end = entry["data_offsets"]
        bits = math.prod(entry["shape"]) * _BITS.get(entry["dtype"], 0)
        sound = 0 <= start <= end and bits in (0, 8 * (end - start))
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise _damaged(path, f"its header describes {name} wrongly")
    return int(end)


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is truncated or damaged, {reason}: download it again")
