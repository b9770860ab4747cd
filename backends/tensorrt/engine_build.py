"""From a captured program to the files of a TensorRT bundle. Imports torch."""

from __future__ import annotations

import importlib
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch

from octavo.backends import host
from octavo.backends.base import BuildOptions, BuiltFiles
from octavo.backends.manifest import Target
from octavo.backends.onnx_lowering import Layouts, to_onnx
from octavo.backends.tensorrt import plugin
from octavo.backends.tensorrt.attention_shapes import shapes_of
from octavo.backends.tensorrt.child import run_builder
from octavo.backends.tensorrt.request import EngineReport, EngineRequest
from octavo.backends.tensorrt.step_shapes import ShapeProfile, shape_profiles
from octavo.graphs import bindings

if TYPE_CHECKING:
    from octavo.backends.tensorrt.flavour import Flavour
    from octavo.graphs.program import CapturedProgram

MODEL_FILE = "model.engine"
KERNELS_FOLDER = "kernels"


def build(
    flavour: Flavour,
    program: CapturedProgram,
    options: BuildOptions,
    capabilities: tuple[str, ...],
    staging: Path,
) -> BuiltFiles:
    """Writes `model.engine` and a kernel file for each capability and kind of attention layer."""
    kernels = _write_kernels(program, options, capabilities, staging)
    caches = tuple(
        program.spec.kv_cache_bindings(options.limits.block_size, options.kv_cache_dtype)
    )
    profiles = shape_profiles(options.profiles, program.inputs, caches, options.limits)
    with tempfile.TemporaryDirectory(prefix="builder-", dir=staging) as name:
        folder = Path(name)
        request = EngineRequest(
            flavour=flavour.name,
            model=folder / "model.onnx",
            engine=staging / MODEL_FILE,
            report=folder / "report.json",
            profiles=profiles,
            compute_capabilities=capabilities,
            aliases={bindings.cache_output_name(one.name): one.name for one in caches},
            num_attention_layers=len(program.spec.layers),
            options=options.tensorrt,
        )
        layouts = Layouts(
            cache_dtype=getattr(torch, options.kv_cache_dtype),
            without_bodies=frozenset({plugin.NAME}),
        )
        ir.save(to_onnx(program, layouts), request.model, external_data="model.onnx.data")
        report = run_builder(request, flavour, folder)
    return BuiltFiles(
        files=(MODEL_FILE, *(file for files in kernels.values() for file in files)),
        target=Target(
            architecture=host.architecture(), device="cuda", compute_capabilities=capabilities
        ),
        kv_layout="reference",
        versions={flavour.module: report.version},
        backend_data=_backend_data(request, report, profiles, kernels),
    )


def _write_kernels(
    program: CapturedProgram,
    options: BuildOptions,
    capabilities: tuple[str, ...],
    staging: Path,
) -> dict[str, list[str]]:
    """The files of each capability, relative to `staging`."""
    if not program.spec.layers:
        return {}
    compiled = importlib.import_module("octavo.backends.gpu_attention.compiled")
    shapes = shapes_of(
        program.spec, options.limits.block_size, options.dtype, options.kv_cache_dtype
    )
    files: dict[str, list[str]] = {}
    for capability in capabilities:
        (staging / KERNELS_FOLDER / capability).mkdir(parents=True)
        for index, shape in enumerate(shapes):
            file = f"{KERNELS_FOLDER}/{capability}/{index}.bin"
            (staging / file).write_bytes(compiled.compile_image(shape, capability).to_bytes())
            files.setdefault(capability, []).append(file)
    return files


def _backend_data(
    request: EngineRequest,
    report: EngineReport,
    profiles: tuple[ShapeProfile, ...],
    kernels: dict[str, list[str]],
) -> dict[str, Any]:
    return {
        "model": MODEL_FILE,
        "plugin": {
            "name": f"{plugin.NAMESPACE}::{plugin.NAME}",
            "version": plugin.VERSION,
            "layers": request.num_attention_layers,
        },
        "profiles": [asdict(profile) for profile in profiles],
        "compute_capabilities": list(request.compute_capabilities),
        "num_layers": report.num_layers,
        "layers": report.layers,
        "inputs": list(report.inputs),
        "outputs": list(report.outputs),
        "aliased": request.aliases,
        "kernels": kernels,
        "options": {k: v for k, v in asdict(request.options).items() if k != "timing_cache"},
        "warnings": list(report.warnings),
    }
