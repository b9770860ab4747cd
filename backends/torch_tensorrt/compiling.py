"""From a captured program to TensorRT engines in an archive of PyTorch.

The operator keeps its functional form `octavo::paged_attention` while torch_tensorrt compiles: it
would give one that changes its cache a copy of it. Only a loaded engine calls the one in place.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass
from torch.utils import _pytree as pytree

from octavo.backends.base import BuildOptions
from octavo.backends.torch import archive
from octavo.backends.torch_tensorrt import libraries
from octavo.backends.torch_tensorrt.shapes import input_shapes
from octavo.graphs.errors import BackendError, BuildError
from octavo.graphs.ops.paged_attention_torch import OPERATOR as PAGED_ATTENTION
from octavo.graphs.program import CapturedProgram

DEVICE = "cuda"
# What a kernel of an engine may use beside its inputs and outputs; more is left to the cache.
WORKSPACE_BYTES = 1 << 30
# Fewer operators in a row than this are not worth the start of an engine.
MIN_BLOCK_SIZE = 5

# Operators that run an engine.
_ENGINES = ("execute_engine", "no_op_placeholder_for_execute_engine")


def compile_program(program: CapturedProgram, options: BuildOptions, path: Path) -> dict[str, int]:
    """Writes the archive; returns how often each operator was left to PyTorch.

    Raises BuildError if torch_tensorrt fails.
    """
    try:
        library = libraries.torch_tensorrt()
    except BackendError as error:
        raise BuildError(str(error)) from error
    archive.drop_traces(program.exported)
    exported = move_to_device_pass(program.exported, DEVICE)
    _flatten_signature(exported)
    inputs = [
        library.Input(
            min_shape=one.min, opt_shape=one.opt, max_shape=one.max, dtype=one.dtype, name=one.name
        )
        for one in input_shapes(program, options)
    ]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = library.dynamo.compile(
                exported,
                arg_inputs=tuple(inputs),
                **settings(library.dynamo.compile, options),
            )
            # As it is, without tracing it once more.
            library.save(module, str(path), output_format="exported_program", retrace=False)
    except Exception as error:
        raise BuildError(
            f"torch_tensorrt cannot compile {program.spec.architecture}: {error}"
        ) from error
    return dict(sorted(Counter(_operators_in_pytorch(module)).items()))


def settings(compile_function: Callable[..., Any], options: BuildOptions) -> dict[str, Any]:
    """What `torch_tensorrt.dynamo.compile` is asked for beside the inputs."""
    asked: dict[str, Any] = {
        "torch_executed_ops": {PAGED_ATTENTION},
        "workspace_size": WORKSPACE_BYTES,
        "min_block_size": MIN_BLOCK_SIZE,
        # The one that leaves the nodes of PyTorch in the graph itself: attention is found there.
        "use_fast_partitioner": False,
        "require_full_compilation": False,
        "truncate_double": True,
        "immutable_weights": True,
        "disable_tf32": True,  # what the model computes in float32 keeps its 24 bits
        "use_fp32_acc": options.dtype == "float16",
    }
    # The graph says every dtype. Releases that no longer ask do as it says.
    if "use_explicit_typing" in inspect.signature(compile_function).parameters:
        asked["use_explicit_typing"] = True
    return asked


def _flatten_signature(exported: ExportedProgram) -> None:
    """Lists of caches become so many inputs and outputs: parts of torch_tensorrt know no lists."""
    signature = exported.module_call_graph[0].signature
    if signature is None:
        raise BuildError("the captured program has no signature: build with --backend onnxruntime")
    num_inputs, num_outputs = signature.in_spec.num_leaves, signature.out_spec.num_leaves
    signature.in_spec = pytree.tree_structure(((0,) * num_inputs, {}))
    signature.out_spec = pytree.tree_structure((0,) * num_outputs)
    signature.forward_arg_names = None


def _operators_in_pytorch(module: fx.GraphModule) -> Iterator[str]:
    """Everything that calls an operator and is no engine, in the graph and those it calls."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                target = node.target
                if isinstance(target, torch._ops.OpOverload) and target._opname not in _ENGINES:
                    yield str(target)
