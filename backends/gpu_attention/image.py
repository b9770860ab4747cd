"""Compiled kernels of one attention shape for one compute capability, as bytes and back.

The bytes: magic, version u32, length of the header u32 (both little-endian), the header (JSON,
UTF-8), then the cubins one after the other. The header holds everything but the cubins, of which it
has length and SHA-256. Nothing here needs Triton, torch or CUDA.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from octavo.backends.gpu_attention.shape import AttentionShape
from octavo.backends.gpu_attention.tiles import Tile, parse_capability
from octavo.graphs.errors import BuildError, BundleError

VERSION = 1
_MAGIC = b"OCTAVOGA"
_PREFIX = struct.Struct("<8sII")


@dataclass(frozen=True)
class CompiledKernel:
    name: str  # of the function in the cubin
    cubin: bytes
    shared_bytes: int  # dynamic shared memory of a thread block
    num_warps: int
    # By name, as AttentionPointers, "num_seqs" and "max_blocks" have them. Behind these the
    # function takes `scratch_pointers` more pointers, which may be null.
    arguments: tuple[str, ...]
    scratch_pointers: int


@dataclass(frozen=True)
class KernelImage:
    capability: str  # such as "9.0"
    shape: AttentionShape
    tile: Tile
    triton_version: str
    write_kv_cache: CompiledKernel
    attend: CompiledKernel

    def runs_on(self, capability: str) -> bool:
        """Whether a device takes these cubins.

        Those of 8.x run on devices of 8.x that are as new; from 9.0 on they are made for one alone.
        """
        built, device = parse_capability(self.capability), parse_capability(capability)
        if built[0] == 8:
            return device[0] == 8 and device[1] >= built[1]
        return built == device

    def to_bytes(self) -> bytes:
        kernels = (self.write_kv_cache, self.attend)
        header = {
            "capability": self.capability,
            "shape": asdict(self.shape),
            "tile": asdict(self.tile),
            "triton_version": self.triton_version,
            "kernels": [_described(kernel) for kernel in kernels],
        }
        text = json.dumps(header, sort_keys=True).encode()
        cubins = b"".join(kernel.cubin for kernel in kernels)
        return _PREFIX.pack(_MAGIC, VERSION, len(text)) + text + cubins

    @staticmethod
    def from_bytes(data: bytes) -> KernelImage:
        """BundleError for bytes that are no kernel image, of another version, or damaged."""
        if len(data) < _PREFIX.size or not data.startswith(_MAGIC):
            raise BundleError(
                f"these {len(data)} bytes are no image of attention kernels: build the engine again"
            )
        _, version, header_size = _PREFIX.unpack_from(data)
        if version != VERSION:
            raise BundleError(
                f"the attention kernels are stored in version {version} and this is version "
                f"{VERSION}: build the engine again"
            )
        text = data[_PREFIX.size : _PREFIX.size + header_size]
        try:
            header = json.loads(text)
            return _parsed(header, data[_PREFIX.size + header_size :])
        except (ValueError, TypeError, KeyError, AttributeError, BuildError) as error:
            raise BundleError(
                f"the header of the attention kernels cannot be read ({error}): build the engine "
                "again"
            ) from error


def _described(kernel: CompiledKernel) -> dict[str, Any]:
    fields = asdict(kernel)
    cubin: bytes = fields.pop("cubin")
    return {**fields, "size": len(cubin), "sha256": hashlib.sha256(cubin).hexdigest()}


def _parsed(header: dict[str, Any], cubins: bytes) -> KernelImage:
    """BundleError for other cubins than the header says; what it lacks raises as it comes."""
    expected = sum(entry["size"] for entry in header["kernels"])
    if len(cubins) != expected:
        _damaged(f"has {len(cubins)} bytes of code instead of {expected}")
    kernels, start = [], 0
    for entry in header["kernels"]:
        fields = dict(entry)
        size, digest = fields.pop("size"), fields.pop("sha256")
        cubin, start = cubins[start : start + size], start + size
        if hashlib.sha256(cubin).hexdigest() != digest:
            _damaged(f"holds code of {fields['name']} that was changed")
        arguments = tuple(fields.pop("arguments"))
        kernels.append(CompiledKernel(**fields, arguments=arguments, cubin=cubin))
    write_kv_cache, attend = kernels
    parse_capability(header["capability"])
    return KernelImage(
        capability=header["capability"],
        shape=AttentionShape(**header["shape"]),
        tile=Tile(**header["tile"]),
        triton_version=header["triton_version"],
        write_kv_cache=write_kv_cache,
        attend=attend,
    )


def _damaged(what: str) -> NoReturn:
    raise BundleError(f"the image of the attention kernels {what}: build the engine again")
