"""From a captured graph to the files of a backend and their manifest, for models and drafters."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

import torch

from octavo.backends.base import Backend, BuildOptions, BuiltFiles, Report
from octavo.backends.manifest import BindingRecord, Manifest
from octavo.compiler import memory
from octavo.compiler.isolation import graph_tracer, prove_isolation
from octavo.compiler.passes import PassOptions, run_passes, run_quantization
from octavo.compiler.stages import Stages
from octavo.graphs import bindings
from octavo.graphs.errors import UnsupportedModelError
from octavo.graphs.program import CapturedProgram
from octavo.graphs.spec import ModelSpec

if TYPE_CHECKING:
    from octavo.compiler.quantization.gguf_blocks import GgufBlocks

_VERSIONED = ("octavo", "torch", "transformers")
# Nodes named in an error: enough to see the pattern.
_NODES_SHOWN = 3


def compile_graph(
    program: CapturedProgram,
    backend: Backend,
    options: BuildOptions,
    stages: Stages,
    blocks: GgufBlocks | None = None,
) -> CapturedProgram:
    """Runs the passes and the proof that tokens are isolated; then floats become integers.

    `blocks`: what the weights were dequantised from. UnsupportedModelError where a node cannot be
    run by the backend.
    """
    wanted = PassOptions(backend.operators(options), options.quantization, options.kv_cache_dtype)
    with stages.stage("passes"):
        program = run_passes(program, wanted)
        memory.release()
    with stages.stage("proof"):
        # Of floats: what is rounded to integers turns the last bit of a sum into a visible step.
        _prove(program, options)
        memory.release()
    if options.quantization != "none" or options.kv_cache_dtype != options.dtype:
        with stages.stage("quantize"):
            program = run_quantization(program, wanted, blocks)
            memory.release()
    _require_supported(program.spec, backend.name, backend.supports(program))
    return program


def _prove(program: CapturedProgram, options: BuildOptions) -> None:
    if program.spec.layers:  # heads work on rows by nature
        dtype = getattr(torch, options.dtype)
        prove_isolation(graph_tracer(program.exported), program.spec, program.block_size, dtype)


def _require_supported(spec: ModelSpec, backend: str, report: Report) -> None:
    if report.ok:
        return
    nodes = report.unsupported
    shown = "; ".join(f"{n.node} ({n.op}): {n.reason}" for n in nodes[:_NODES_SHOWN])
    more = f" and {len(nodes) - _NODES_SHOWN} more" if len(nodes) > _NODES_SHOWN else ""
    raise UnsupportedModelError(
        f"{spec.architecture} has {len(nodes)} nodes that the {backend} backend cannot run, "
        f"{shown}{more}: choose another backend"
    )


def graph_manifest(
    program: CapturedProgram,
    backend: Backend,
    options: BuildOptions,
    built: BuiltFiles,
) -> Manifest:
    """The manifest of a graph whose files a backend has built."""
    spec, block_size = program.spec, options.limits.block_size
    caches = [_record(b) for b in spec.kv_cache_bindings(block_size, options.kv_cache_dtype)]
    changed = [
        cache.model_copy(update={"name": bindings.cache_output_name(cache.name)})
        for cache in caches
    ]
    versions = {name: importlib.metadata.version(name) for name in _VERSIONED}
    return Manifest(
        backend=backend.name,
        spec=spec,
        limits=options.limits,
        dtype=options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        kv_layout=built.kv_layout,
        quantization=options.quantization,
        inputs=(*map(_record, program.inputs), *caches),
        outputs=(*map(_record, spec.output_bindings), *changed),
        profiles=options.profiles,
        passes=program.records,
        target=built.target,
        versions={**versions, **built.versions},
        backend_data=dict(built.backend_data),
    )


def _record(binding: bindings.Binding) -> BindingRecord:
    return BindingRecord(name=binding.name, dtype=binding.dtype, shape=binding.shape)
