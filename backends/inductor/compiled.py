"""From a graph to the package of its compiled code, `.pt2`, and the file of its weights."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch._inductor
from torch import Tensor, fx
from torch._inductor.package.package import package_aoti

from octavo.backends import host
from octavo.graphs.errors import BuildError

# The x86-64 levels that a build for this machine may be compiled for, the best first, with what
# Linux calls the features of each that not every such processor has.
_LEVELS = (
    (
        "x86-64-v4",
        ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma", "bmi2", "f16c"),
    ),
    ("x86-64-v3", ("avx2", "fma", "bmi2", "f16c")),
)
# PyTorch's vector types round sines and exponentials otherwise than the code for the elements that
# are left over, so that a token's bits would depend on how many there are. One lane has no rest.
_LANES = 1


def machine_options() -> tuple[dict[str, Any], tuple[str, ...]]:
    """Options of the compiler for this processor's level, and the CPU features that it takes.

    A level instead of the processor itself: the engine runs on every machine of that level.
    """
    found = host.cpu_features()
    for level, features in _LEVELS:
        if found.issuperset(features):
            return {"cpp.march": level, "cpp.simdlen": _LANES}, features
    return {"cpp.simdlen": _LANES}, ()


def compile_package(
    module: fx.GraphModule, package: Path, machine: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Writes the code of `module` to `package`; returns the tensors that it reads, by name.

    The example inputs are those that the graph was captured with, sizes symbolic. `machine`:
    options of the compiler. Raises BuildError with its reason.
    """
    examples = tuple(node.meta["val"] for node in module.graph.find_nodes(op="placeholder"))
    options = {
        "aot_inductor.package": True,
        "aot_inductor.package_constants_in_so": False,
        **machine,
    }
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(dir=package.parent) as folder:
        warnings.simplefilter("ignore")
        try:
            with torch.no_grad():
                files: Any = torch._inductor.aot_compile(module, examples, options=options)
            package_aoti(str(package), _anonymous(files, Path(folder)))
        except Exception as error:
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise BuildError(
                f"AOTInductor of torch {torch.__version__} cannot compile the graph "
                f"({first_line}): use --backend onnxruntime, or report the model"
            ) from error
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _anonymous(files: list[str], folder: Path) -> Any:
    """Copies in `folder` without source, debugging information and names of folders.

    The compiler writes where a source lies into the code that reports errors.
    """
    kept = []
    for source in map(Path, files):
        if source.suffix == ".cpp":
            continue
        copy = folder / source.name
        shutil.copyfile(source, copy)
        kept.append(str(copy))
        if source.suffix == ".so":
            subprocess.run(["strip", "--strip-unneeded", str(copy)], check=True)
            code = copy.read_bytes()
            for place in (str(source.parents[1]), str(Path(torch.__file__).parents[1])):
                hidden = b"." + b"/" * (len(os.fsencode(place)) - 1)
                code = code.replace(os.fsencode(place), hidden)
            copy.write_bytes(code)
    return kept
