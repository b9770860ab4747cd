"""Paged attention for GPUs as far as a CPU goes: interpreted, compiled, stored, handed to a driver.

What the kernels compute is in `gpu_attention_interpreted.py`, run from here in its own process.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from octavo.backends.gpu_attention import AttentionShape
from octavo.backends.gpu_attention.compiled import compile_image
from octavo.backends.gpu_attention.configuration import attend_grid
from octavo.backends.gpu_attention.image import CompiledKernel, KernelImage
from octavo.backends.gpu_attention.launch import AttentionPointers, LoadedAttention
from octavo.backends.gpu_attention.tiles import TILES, Tile, choose_tile, shared_bytes
from octavo.graphs.errors import BackendError, BuildError, BundleError, IncompatibleEngineError
from tests.backend.gpu_attention_steps import attention_shape

HALF = attention_shape(
    num_heads=32, num_kv_heads=8, head_size=128, value_head_size=128, dtype="float16"
)
EVERYTHING = replace(
    HALF,
    sliding_window=100,
    softcap=30.0,
    has_sinks=True,
    has_alibi=True,
    dtype="bfloat16",
    cache_dtype="float8_e4m3fn",
)


@pytest.fixture(autouse=True)
def compiled_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing compiled earlier is found."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_under_the_interpreter() -> None:
    path = Path(__file__).with_name("gpu_attention_interpreted.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


# Each capability with the architecture's number, and whether its cubins are for it alone ("a").
@pytest.mark.parametrize(
    ("capability", "number"), [("8.0", 80), ("9.0", 90), ("10.0", 100), ("12.0", 120)]
)
@pytest.mark.parametrize("shape", [HALF, EVERYTHING], ids=["plain", "everything"])
def test_compiles_for_a_capability_without_a_gpu(
    shape: AttentionShape, capability: str, number: int
) -> None:
    image = compile_image(shape, capability)
    assert (image.capability, image.shape) == (capability, shape)
    assert image.tile == choose_tile(shape, capability)
    for kernel in (image.write_kv_cache, image.attend):
        header = struct.Struct("<4s5B7xHHIQQQI").unpack_from(kernel.cubin)
        magic, bits, order, _, _, abi = header[:6]
        machine, flags = header[7], header[-1]
        assert (magic, bits, order) == (b"\x7fELF", 2, 1)
        assert machine == 190  # EM_CUDA
        # The assembler for 9.0 and later writes the architecture into the second byte.
        assert (flags >> 8 if abi >= 8 else flags) & 0xFF == number
        assert kernel.name.encode() in kernel.cubin
        assert kernel.shared_bytes <= TILES[capability].shared_memory
        assert kernel.scratch_pointers == 2
        assert b"gpu_attention/" not in kernel.cubin, "the cubin names a folder of this machine"
    assert image.attend.num_warps == image.tile.num_warps
    assert image.write_kv_cache.arguments == (
        "key", "value", "kv_cache", "slot_mapping", "query_start_loc", "output", "num_seqs",
    )  # fmt: skip


def test_compiles_float32_for_a_capability_outside_the_table() -> None:
    image = compile_image(replace(HALF, dtype="float32", cache_dtype="float32"), "8.7")
    assert image.tile.block_m == 16
    assert image.attend.shared_bytes <= 99 * 1024


def test_a_tile_too_large_is_refused() -> None:
    tile = Tile(block_m=128, block_n=128, num_warps=8, num_stages=3)
    # Queries 32 KiB, three stages of keys and values 64 KiB each, weights 32 KiB.
    assert shared_bytes(HALF, tile) == (32 + 3 * 64 + 32) * 1024
    with pytest.raises(BuildError, match=r"262144 bytes .* 8\.9 has 101376: take a smaller tile"):
        compile_image(HALF, "8.9", tile=tile)
    with pytest.raises(BuildError, match="smallest tile"):
        choose_tile(replace(HALF, head_size=4096), "8.6")


@pytest.mark.parametrize("capability", [*TILES, "8.7", "11.0"])
@pytest.mark.parametrize("head_size", [1, 64, 80, 128, 256, 512])
def test_every_common_head_has_a_tile(head_size: int, capability: str) -> None:
    for changes in ({"dtype": "float32"}, {"dtype": "float16"}):
        shape = attention_shape(head_size=head_size, value_head_size=head_size, **changes)
        tile = choose_tile(shape, capability)
        limit = TILES[capability].shared_memory if capability in TILES else 101376
        assert shared_bytes(shape, tile) <= limit


@pytest.mark.parametrize(
    ("capability", "reason"), [("7.5", "8.0 or newer"), ("sm_80", "no compute capability")]
)
def test_refused_capabilities(capability: str, reason: str) -> None:
    with pytest.raises(BuildError, match=reason):
        compile_image(HALF, capability)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_heads": 9}, "9 query heads cannot share 8"),
        ({"block_size": 0}, "block_size of at least 1, not 0"),
        ({"softcap": -1.0}, r"softcap is -1\.0"),
        ({"dtype": "float64"}, "no dtype 'float64'"),
        ({"cache_dtype": "bfloat16"}, "cache of 'bfloat16' does not go with float16"),
    ],
)
def test_refused_shapes(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(BuildError, match=reason):
        replace(HALF, **changes)


def test_the_grid_covers_every_split_of_tokens_into_sequences() -> None:
    # 64 rows are 16 tokens of 4 heads: 33 tokens are at most 2 + B tiles however they are split.
    tile = Tile(block_m=64, block_n=64, num_warps=4, num_stages=2)
    assert attend_grid(HALF, tile, 33, 3) == (5, 8, 1)
    # 71 heads of one KV head take two tiles of 64 heads, a token each.
    assert attend_grid(replace(HALF, num_heads=71, num_kv_heads=1), tile, 4, 2) == (6, 2, 1)


def made_image(capability: str = "9.0", shared_bytes: int = 80_000) -> KernelImage:
    def kernel(name: str, arguments: str, shared: int) -> CompiledKernel:
        names = tuple(arguments.split())
        return CompiledKernel(name, name.encode() * 3, shared, 4, names, 2)

    return KernelImage(
        capability,
        EVERYTHING,
        Tile(64, 64, 4, 3),
        "3.9.0",
        kernel("write_kv_cache", "key slot_mapping num_seqs", 0),
        kernel("attend", "query kv_cache sinks output num_seqs max_blocks", shared_bytes),
    )


def test_an_image_survives_its_bytes() -> None:
    image = made_image()
    assert KernelImage.from_bytes(image.to_bytes()) == image


def header_changed(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    size = struct.unpack_from("<I", data, 12)[0]
    header = json.loads(data[16 : 16 + size])
    change(header)
    text = json.dumps(header).encode()
    return data[:12] + struct.pack("<I", len(text)) + text + data[16 + size :]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:9], "these 9 bytes are no image"),
        (lambda data: b"x" + data[1:], "are no image"),
        (lambda data: data[:8] + b"\7" + data[9:], "version 7 and this is version 1"),
        (lambda data: data[:60], "header .* cannot be read"),
        (lambda data: data[:-1], "has 59 bytes of code instead of 60"),
        (lambda data: data + b"!", "has 61 bytes of code instead of 60"),
        (lambda data: data[:-1] + b"!", "holds code of attend that was changed"),
        (lambda d: header_changed(d, lambda h: h.pop("tile")), "cannot be read .*'tile'"),
        (lambda d: header_changed(d, lambda h: h["shape"].update(num_heads=9)), "9 query heads"),
        (lambda d: header_changed(d, lambda h: h.update(capability="90")), "'90' is no compute"),
        (lambda d: header_changed(d, lambda h: h.update(kernels=[])), "60 bytes of code instead"),
    ],
)
def test_damaged_images_are_refused(damage: Callable[[bytes], bytes], reason: str) -> None:
    with pytest.raises(BundleError, match=reason):
        KernelImage.from_bytes(damage(made_image().to_bytes()))


class Status(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_IMAGE = 200


class FunctionAttribute(Enum):
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


class DeviceAttribute(Enum):
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76


@dataclass
class FakeDriver:
    """`cuda.bindings.driver` by its documentation: each call returns a tuple, status first."""

    capability: tuple[int, int] = (9, 0)
    context: int = 17
    failing: str = ""
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    CUresult: type[Enum] = Status
    CUfunction_attribute: type[Enum] = FunctionAttribute
    CUdevice_attribute: type[Enum] = DeviceAttribute

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, arguments))
            if name == self.failing:
                return (Status.CUDA_ERROR_INVALID_IMAGE, None)
            result = self._result(name, arguments)
            return (Status.CUDA_SUCCESS,) if result is None else (Status.CUDA_SUCCESS, result)

        return call

    def _result(self, name: str, arguments: tuple[Any, ...]) -> Any:
        match name:
            case "cuCtxGetCurrent":
                return self.context
            case "cuCtxGetDevice":
                return 3
            case "cuDeviceGetAttribute":
                assert arguments[1] == 3
                return self.capability[arguments[0].value - 75]
            case "cuModuleLoadData":
                return f"module of {arguments[0].decode()}"
            case "cuModuleGetFunction":
                return f"{arguments[1].decode()} in {arguments[0]}"
        return None

    def arguments_of(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for called, arguments in self.calls if called == name]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    return fake


# Addresses that differ in every place, aligned where they must be.
POINTERS = AttentionPointers(
    query=0x1000, key=0x2000, value=0x3000, kv_cache=1 << 40, slot_mapping=0x5004,
    block_tables=0x6000, query_start_loc=0x7000, prefix_offsets=0x8000, sinks=0x9000,
    alibi_slopes=0xA000, output=0xB000,
)  # fmt: skip
WRITE = "write_kv_cache in module of write_kv_cachewrite_kv_cachewrite_kv_cache"
ATTEND = "attend in module of attendattendattend"


def test_a_launch_goes_to_the_driver_as_compiled(driver: FakeDriver) -> None:
    loaded = LoadedAttention(made_image())
    shared = FunctionAttribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert driver.arguments_of("cuFuncSetAttribute") == [(ATTEND, shared, 80_000)]
    driver.calls.clear()
    loaded.launch(POINTERS, num_tokens=33, num_seqs=3, max_blocks=20, stream=77)
    pointer, size = ctypes.c_void_p, ctypes.c_int32
    write = ((0x2000, 0x5004, 3, 0, 0), (pointer, pointer, size, pointer, pointer))
    attend = (
        (0x1000, 1 << 40, 0x9000, 0xB000, 3, 20, 0, 0),
        (pointer, pointer, pointer, pointer, size, size, pointer, pointer),
    )
    # Grids as above, 128 threads a block; the write comes first, and nothing else is called.
    assert driver.calls == [
        ("cuLaunchKernel", (WRITE, 33, 8, 1, 128, 1, 1, 0, 77, write, 0)),
        ("cuLaunchKernel", (ATTEND, 5, 8, 1, 128, 1, 1, 80_000, 77, attend, 0)),
    ]


def test_little_shared_memory_is_not_asked_for(driver: FakeDriver) -> None:
    LoadedAttention(made_image(shared_bytes=48 * 1024))
    assert driver.arguments_of("cuFuncSetAttribute") == []


def test_nothing_is_launched_without_tokens_or_sequences(driver: FakeDriver) -> None:
    loaded = LoadedAttention(made_image())
    loaded.launch(POINTERS, num_tokens=0, num_seqs=1, max_blocks=1, stream=0)
    assert driver.arguments_of("cuLaunchKernel") == []
    loaded.launch(POINTERS, num_tokens=2, num_seqs=0, max_blocks=1, stream=0)
    assert [one[0] for one in driver.arguments_of("cuLaunchKernel")] == [WRITE]


def test_closing_unloads_both_modules_once(driver: FakeDriver) -> None:
    loaded = LoadedAttention(made_image())
    loaded.close()
    loaded.close()
    assert len(driver.arguments_of("cuModuleUnload")) == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"query": 0x1008}, "query lies at address 0x1008, which is not a multiple of 16"),
        ({"kv_cache": 8}, "kv_cache lies at address 0x8"),
        ({"sinks": 0}, "read sinks and its address is 0"),
        ({"alibi_slopes": 0}, "read alibi_slopes and its address is 0"),
    ],
)
@pytest.mark.usefixtures("driver")
def test_refused_pointers(changes: dict[str, int], reason: str) -> None:
    loaded = LoadedAttention(made_image())
    with pytest.raises(BackendError, match=reason):
        loaded.launch(replace(POINTERS, **changes), 1, 1, 1, 0)


@pytest.mark.parametrize(
    ("built", "device", "runs"),
    [
        ("8.0", (8, 0), True),
        ("8.0", (8, 9), True),
        ("8.6", (8, 0), False),
        ("8.9", (9, 0), False),
        ("9.0", (9, 0), True),
        ("10.0", (10, 3), False),
        ("9.0", (7, 5), False),
    ],
)
def test_devices_that_an_image_runs_on(
    driver: FakeDriver, built: str, device: tuple[int, int], runs: bool
) -> None:
    driver.capability = device
    if runs:
        LoadedAttention(made_image(built))
        return
    with pytest.raises(IncompatibleEngineError, match=f"this device has {device[0]}.{device[1]}:"):
        LoadedAttention(made_image(built))
    assert driver.arguments_of("cuModuleLoadData") == []


def test_no_context(driver: FakeDriver) -> None:
    driver.context = 0
    with pytest.raises(BackendError, match="no CUDA context is current"):
        LoadedAttention(made_image())


def test_a_failing_call_is_named_and_leaves_nothing_loaded(driver: FakeDriver) -> None:
    driver.failing = "cuModuleGetFunction"
    with pytest.raises(BackendError, match=r"cuModuleGetFunction failed with CUDA_ERROR_INVALID"):
        LoadedAttention(made_image())
    assert len(driver.arguments_of("cuModuleUnload")) == 1


def test_bindings_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(BackendError, match="install cuda-python"):
        LoadedAttention(made_image())


def test_launching_needs_neither_triton_nor_torch() -> None:
    check = (
        "import sys, octavo.backends.gpu_attention.launch, octavo.backends.gpu_attention.compiled;"
        "print(sorted({'torch', 'triton', 'cuda'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
