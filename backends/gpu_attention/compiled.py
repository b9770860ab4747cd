"""From a shape to compiled kernels, with no GPU: by Triton and the assembler that it brings."""

from __future__ import annotations

from typing import Any

from octavo.backends.gpu_attention import configuration
from octavo.backends.gpu_attention.configuration import (
    ALIGNED_ARGUMENTS,
    ALIGNMENT,
    Constant,
    Option,
)
from octavo.backends.gpu_attention.image import CompiledKernel, KernelImage
from octavo.backends.gpu_attention.shape import AttentionShape
from octavo.backends.gpu_attention.tiles import (
    Tile,
    choose_tile,
    parse_capability,
    require_fit,
    tiles_of,
)
from octavo.graphs.errors import BuildError

__all__ = ["CompiledKernel", "KernelImage", "compile_image"]

# Triton appends two pointers, to scratch memory and to a profiler's; both unused here.
_SCRATCH_POINTERS = 2
_TRITON_TYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
}


def compile_image(
    shape: AttentionShape, capability: str, *, tile: Tile | None = None
) -> KernelImage:
    """Both kernels for one compute capability, such as "8.9", with the table's tile or another.

    Raises BuildError where Triton is missing, where it cannot compile, and for a tile that needs
    more shared memory than the device has.
    """
    try:
        import triton
    except ImportError as error:
        raise BuildError(
            f"the GPU attention kernels need Triton, which cannot be imported ({error}): install "
            "triton"
        ) from error
    tile = tile or choose_tile(shape, capability)
    require_fit(shape, tile, capability)
    return KernelImage(
        capability=capability,
        shape=shape,
        tile=tile,
        triton_version=triton.__version__,
        write_kv_cache=_compile(
            "write_kv_cache",
            shape,
            capability,
            configuration.write_constants(shape, capability),
            configuration.WRITE_OPTIONS,
        ),
        attend=_compile(
            "attend",
            shape,
            capability,
            configuration.attend_constants(shape, tile, capability),
            configuration.attend_options(tile),
        ),
    )


def _compile(
    name: configuration.KernelName,
    shape: AttentionShape,
    capability: str,
    constants: dict[str, Constant],
    options: dict[str, Option],
) -> CompiledKernel:
    import triton
    from triton.backends.compiler import GPUTarget

    major, minor = parse_capability(capability)
    source = _source(name, shape, capability, constants)
    with triton.knobs.compilation.scope():
        # Line tables would hold the names of this machine's folders.
        triton.knobs.compilation.disable_line_info = True
        try:
            compiled = triton.compile(
                source,
                target=GPUTarget("cuda", major * 10 + minor, 32),
                options=dict(options),
            )
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            raise BuildError(
                f"Triton {triton.__version__} cannot compile {name} for compute capability "
                f"{capability} ({reason}): build for another device, or report the model"
            ) from error
    return _checked(name, compiled, capability)


def _source(
    name: configuration.KernelName,
    shape: AttentionShape,
    capability: str,
    constants: dict[str, Constant],
) -> Any:
    """What Triton compiles: the kernel, its arguments' types, its constants, alignments."""
    from triton.compiler import ASTSource

    from octavo.backends.gpu_attention import kernels

    function: Any = getattr(kernels, name)
    if not hasattr(function, "cache_key"):
        raise BuildError(
            "TRITON_INTERPRET is set, which leaves Triton nothing to compile: unset it to build"
        )
    cache_type = _TRITON_TYPES[shape.cache_dtype]
    if configuration.cache_mode(shape, capability) == 2:
        cache_type = "u8"
    types = {"*T": f"*{_TRITON_TYPES[shape.dtype]}", "*C": f"*{cache_type}"}
    arguments = configuration.ARGUMENTS[name]
    signature = {argument: types.get(type_, type_) for argument, type_ in arguments.items()}
    signature.update(dict.fromkeys(constants, "constexpr"))
    names = list(function.arg_names)
    if list(signature) != names:
        raise AssertionError(f"the arguments of {name} and their configuration differ: {names}")
    aligned = {
        (names.index(argument),): [["tt.divisibility", ALIGNMENT]]
        for argument in arguments
        if argument in ALIGNED_ARGUMENTS
    }
    return ASTSource(function, signature, constexprs=constants, attrs=aligned)


def _checked(name: configuration.KernelName, compiled: Any, capability: str) -> CompiledKernel:
    metadata = compiled.metadata
    limit = tiles_of(capability).shared_memory
    if metadata.shared > limit:
        raise BuildError(
            f"{name} was compiled to take {metadata.shared} bytes of shared memory and compute "
            f"capability {capability} has {limit}: take a smaller tile"
        )
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise BuildError(
            f"{name} was compiled to take {metadata.global_scratch_size} bytes of scratch memory, "
            "which no launcher here gives it: report the model"
        )
    return CompiledKernel(
        name=metadata.name,
        cubin=compiled.asm["cubin"],
        shared_bytes=metadata.shared,
        num_warps=metadata.num_warps,
        arguments=tuple(configuration.ARGUMENTS[name]),
        scratch_pointers=_SCRATCH_POINTERS,
    )
