"""Building and checking AOTInductor engines. Imports nothing heavy."""

from __future__ import annotations

import importlib
import os
import shutil
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
from octavo.backends.kernels import supported
from octavo.backends.libraries import version_of
from octavo.graphs.errors import BuildError
from octavo.graphs.ops.paged_attention import SCHEMA as PAGED_ATTENTION

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from octavo.backends.base import Executable
    from octavo.backends.manifest import Manifest
    from octavo.graphs.program import CapturedProgram
    from octavo.graphs.spec import Device

MODEL_FILE = "model.pt2"
WEIGHTS_FILE = "model.weights"
WEIGHTS_INDEX_FILE = "model.weights.json"
ACCEPT_FILE = "accept.pt2"
CUDA_DEVICE = "cuda"  # CUDA_VISIBLE_DEVICES chooses which one that is


class InductorBackend:
    name = "inductor"
    devices: tuple[Device, ...] = ("cpu", "cuda")
    libraries = ("torch",)
    tested: Mapping[Device, Tested] = {"cpu": "run", "cuda": "simulated"}

    def operators(self, kind: EngineKind) -> frozenset[str]:
        if kind.device == "cuda":
            return frozenset({PAGED_ATTENTION.name})
        return supported.OPERATORS

    def require(self, kind: EngineKind, block_size: int) -> None:
        if kind.device == "cpu":
            supported.require(self.name, kind, block_size)
        elif kind.quantization != "none" or kind.kv_cache_dtype != kind.dtype:
            raise BuildError(
                "the inductor backend has kernels of integers for CPUs alone: leave out "
                "--quantization and --kv-cache-dtype, or build with --device cpu"
            )

    def can_build(self, kind: EngineKind) -> Compatibility:
        """For CUDA, on a machine with the device that the engine is to run on."""
        for tool in (os.environ.get("CXX", "g++"), "strip"):
            if shutil.which(tool) is None:
                return Compatibility(
                    f"{tool}, which the graph is compiled with, is not installed: install g++, or "
                    "name another compiler in CXX"
                )
        if kind.device == "cpu":
            return Compatibility()
        here = cuda_devices.compute_capabilities()[:1]
        if here and kind.compute_capabilities not in ((), here):
            return Compatibility(
                f"--compute-capability {kind.compute_capabilities[0]} is not that of this "
                f"machine's device, {here[0]}, which it builds for: leave it out"
            )
        return self.can_run("cuda")

    def can_run(self, device: Device) -> Compatibility:
        if version_of("torch") is None:
            return Compatibility("torch is not installed: install Octavo with its extra [build]")
        if device == "cpu":
            return Compatibility()
        if version_of("triton") is None:
            return Compatibility(
                "triton, which the attention kernel on CUDA is launched by, is not installed: "
                "install PyTorch's build for CUDA"
            )
        return cuda_devices.check_device()

    def supports(self, program: CapturedProgram) -> Report:
        """The graph was captured from PyTorch, whose every operator AOTInductor can call."""
        return Report()

    def build(self, program: CapturedProgram, options: BuildOptions, staging: Path) -> BuiltFiles:
        """Writes the compiled code and the weights that it reads, to be mapped."""
        from octavo.backends.inductor.compiled import compile_package, machine_options
        from octavo.backends.inductor.native_graph import cuda_module, native_module
        from octavo.backends.inductor.weights import write_weights
        from octavo.backends.manifest import Target

        compiler_options, features = machine_options()
        capabilities: tuple[str, ...] = ()
        if options.device == "cpu":
            module = native_module(program.exported)
        else:
            module = cuda_module(program.exported, CUDA_DEVICE)
            capabilities = cuda_devices.compute_capabilities()[:1]
        weights = compile_package(module, staging / MODEL_FILE, compiler_options)
        write_weights(weights, staging / WEIGHTS_FILE, staging / WEIGHTS_INDEX_FILE)
        return BuiltFiles(
            files=(MODEL_FILE, WEIGHTS_FILE, WEIGHTS_INDEX_FILE),
            target=Target(
                architecture=host.architecture(),
                device=options.device,
                cpu_features=features,
                compute_capabilities=capabilities,
            ),
            kv_layout="k_transposed" if options.device == "cpu" else "reference",
            versions={},
            backend_data={
                "model": MODEL_FILE,
                "weights": WEIGHTS_FILE,
                "weights_index": WEIGHTS_INDEX_FILE,
            },
        )

    def build_accept(self, exported: ExportedProgram, staging: Path) -> str:
        from octavo.backends.inductor.compiled import compile_package, machine_options
        from octavo.backends.inductor.native_graph import native_module

        compile_package(native_module(exported), staging / ACCEPT_FILE, machine_options()[0])
        return ACCEPT_FILE

    def check(self, manifest: Manifest) -> Compatibility:
        installed = self.can_run(manifest.target.device)
        if not installed.ok:
            return installed
        version, built = version_of("torch"), manifest.versions.get("torch", "unknown")
        if str(version).split("+")[0] != built.split("+")[0]:
            return Compatibility(
                f"the engine was compiled with torch {built} and this is torch {version}, whose "
                f"functions it may not call: install torch {built} or build the engine again"
            )
        if manifest.target.device == "cuda":
            needed = manifest.target.compute_capabilities
            here = cuda_devices.compute_capabilities()[:1]
            if here != needed:
                return Compatibility(
                    f"the engine was built for a device of compute capability {', '.join(needed)}, "
                    f"this machine's has {', '.join(here)}: build it again here"
                )
        return host.check_target(manifest.target)

    def import_library(self) -> None:
        importlib.import_module("octavo.backends.inductor.executable")

    def load(self, bundle: Path, manifest: Manifest, options: LoadOptions) -> Executable:
        from octavo.backends.inductor.executable import InductorExecutable, load_on_cuda

        if manifest.target.device == "cuda":
            return load_on_cuda(bundle, manifest, options, CUDA_DEVICE)
        return InductorExecutable(bundle, manifest, options)
