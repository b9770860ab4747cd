"""Building and checking Torch-TensorRT engines; torch_tensorrt imports only where CUDA is."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.backends import cuda_devices, host
from octavo.backends.base import (
    BuildOptions,
    BuiltFiles,
    Compatibility,
    EngineKind,
    LoadOptions,
    Report,
    Tested,
)
from octavo.backends.torch_tensorrt import libraries
from octavo.graphs.errors import BuildError
from octavo.graphs.ops.paged_attention import SCHEMA as PAGED_ATTENTION

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from octavo.backends.manifest import Manifest
    from octavo.backends.torch_cuda.executable import TorchCudaExecutable
    from octavo.graphs.program import CapturedProgram
    from octavo.graphs.spec import Device

MODEL_FILE = "model.pt2"
ACCEPT_FILE = "accept.pt2"


class TorchTensorRTBackend:
    name = "torch_tensorrt"
    devices: tuple[Device, ...] = ("cuda",)
    libraries = ("torch-tensorrt",)
    tested: Mapping[Device, Tested] = {"cuda": "simulated"}

    def operators(self, kind: EngineKind) -> frozenset[str]:
        return frozenset({PAGED_ATTENTION.name})

    def require(self, kind: EngineKind, block_size: int) -> None:
        if kind.quantization != "none":
            raise BuildError(
                f"--quantization {kind.quantization} has no kernels of the torch_tensorrt backend: "
                "leave it out"
            )
        host.refuse_fp8(self.name, kind)
        if kind.kv_cache_dtype == "int8":
            raise BuildError(
                "--kv-cache-dtype int8 has no kernel of the torch_tensorrt backend: leave it out"
            )

    def can_build(self, kind: EngineKind) -> Compatibility:
        """On the machine that the engine is to run on."""
        machine = self.can_run("cuda")
        if not machine.ok:
            return machine
        here = cuda_devices.compute_capabilities()[0]
        if any(wanted != here for wanted in kind.compute_capabilities):
            return Compatibility(
                f"--compute-capability {kind.compute_capabilities[0]} is not that of this "
                f"machine's device, {here}, which it builds for: leave it out"
            )
        return Compatibility()

    def can_run(self, device: Device) -> Compatibility:
        missing = libraries.check_installed()
        return cuda_devices.check_device() if missing.ok else missing

    def supports(self, program: CapturedProgram) -> Report:
        """What TensorRT has no converter for stays with PyTorch, and is named in the manifest."""
        return Report()

    def build(self, program: CapturedProgram, options: BuildOptions, staging: Path) -> BuiltFiles:
        from octavo.backends.manifest import Target
        from octavo.backends.torch_tensorrt.compiling import compile_program

        left_to_pytorch = compile_program(program, options, staging / MODEL_FILE)
        return BuiltFiles(
            files=(MODEL_FILE,),
            target=Target(
                architecture=host.architecture(),
                device="cuda",
                compute_capabilities=cuda_devices.compute_capabilities()[:1],
            ),
            kv_layout="reference",
            versions=libraries.installed(),
            backend_data={"left_to_pytorch": left_to_pytorch},
        )

    def build_accept(self, exported: ExportedProgram, staging: Path) -> str:
        """Acceptance reads logits of the host, and runs there."""
        from octavo.backends.torch.archive import save

        save(exported, staging / ACCEPT_FILE)
        return ACCEPT_FILE

    def check(self, manifest: Manifest) -> Compatibility:
        for compatibility in (self.can_run("cuda"), libraries.check(manifest.versions)):
            if not compatibility.ok:
                return compatibility
        here, built = cuda_devices.compute_capabilities()[0], manifest.target.compute_capabilities
        if here not in built:
            return Compatibility(
                f"the engine was built for a device of compute capability {', '.join(built)}, this "
                f"machine's has {here}: build it again here"
            )
        return host.check_target(manifest.target)

    def import_library(self) -> None:
        importlib.import_module("octavo.backends.torch_tensorrt.executable")
        libraries.torch_tensorrt()

    def load(self, bundle: Path, manifest: Manifest, options: LoadOptions) -> TorchCudaExecutable:
        from octavo.backends.torch_tensorrt import executable

        return executable.load(bundle / MODEL_FILE, manifest, options)
