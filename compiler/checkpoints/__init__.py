"""Opening a checkpoint: a Hugging Face folder, a `.gguf` file or the packaged model's name."""

from __future__ import annotations

from pathlib import Path

from octavo.compiler.checkpoints.base import Checkpoint, TokenFacts
from octavo.compiler.checkpoints.gguf_file import GgufFile
from octavo.compiler.checkpoints.hf_folder import HfFolder
from octavo.compiler.checkpoints.packaged import PACKAGED_MODELS, packaged_file
from octavo.graphs.errors import CheckpointError

__all__ = ["PACKAGED_MODELS", "Checkpoint", "TokenFacts", "open_checkpoint"]


def open_checkpoint(model: str | Path, *, trust_remote_code: bool = False) -> Checkpoint:
    """Opens a local checkpoint and checks its files, without loading torch or transformers.

    Raises CheckpointError if nothing of the kind is there or a file is missing or damaged. No model
    hub is ever asked. A folder named like a packaged model wins over the package.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return HfFolder(path, trust_remote_code=trust_remote_code)
    if path.is_file():
        return _open_file(path)
    if str(model) in PACKAGED_MODELS:
        return GgufFile(packaged_file(str(model)))
    raise CheckpointError(
        f"{model} is no local checkpoint: give a Hugging Face folder, a .gguf file or one of "
        f"{', '.join(PACKAGED_MODELS)} (nothing is downloaded from a model hub)"
    )


def _open_file(path: Path) -> Checkpoint:
    if path.suffix == ".gguf":
        return GgufFile(path)
    if path.suffix in (".safetensors", ".json"):
        raise CheckpointError(f"{path} is one file of a checkpoint: give its folder {path.parent}")
    raise CheckpointError(f"{path} is no checkpoint: give a Hugging Face folder or a .gguf file")
