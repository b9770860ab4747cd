"""A `.gguf` file, read through transformers' mapping and dequantized."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.backends.bundle import sha256_of
from octavo.compiler.checkpoints import tokenizer_files
from octavo.compiler.checkpoints.base import Checkpoint
from octavo.compiler.checkpoints.gguf_header import GgufHeader, read_header
from octavo.compiler.checkpoints.gguf_session import GgufSession
from octavo.compiler.checkpoints.hf_session import first_line, quiet_and_offline
from octavo.compiler.checkpoints.weights import load_causal_lm
from octavo.graphs.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

_NAME = "model.gguf"
# Tensors that rescale rotary frequencies: transformers drops them, and the text would go wrong.
_ROTARY_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_ROTARY_VALUES: dict[str, tuple[object, ...]] = {
    "rope.scaling.type": ("none", "linear"),
    "rope.scaling.factor": (1.0, 0.0),
    "rope.scale_linear": (1.0, 0.0),  # its name in old files
}
_MORE_ENDS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


class GgufFile(Checkpoint):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._header = read_header(path)
        _require_whole_file(path, self._header)
        _require_plain_rotary(path, self._header)
        self._session = GgufSession(path)

    def content_digest(self) -> str:
        return sha256_of(self.path)

    def gguf_tensors(self) -> Sequence[Any]:
        return self._session.tensors()

    def load_model(self, dtype: torch.dtype) -> PreTrainedModel:
        from transformers import GgufConfig

        config = self.config
        with self._alone() as folder:
            model, notes = load_causal_lm(
                self.path,
                folder,
                gguf_file=_NAME,
                config=config,
                # Packed weights would need kernels from the hub and could not be captured.
                quantization_config=GgufConfig(gguf_file=_NAME, dequantize=True),
                dtype=dtype,
            )
        self._notes += notes
        return model

    def _read_config(self) -> PreTrainedConfig:
        import transformers

        try:
            with quiet_and_offline(), self._alone() as folder:
                config: PreTrainedConfig = transformers.AutoConfig.from_pretrained(
                    str(folder), gguf_file=_NAME, local_files_only=True
                )
        except ValueError as error:
            if "not supported" not in str(error):
                raise CheckpointError(
                    f"the config of {self.path} cannot be read ({first_line(error)})"
                ) from error
            raise UnsupportedModelError(
                f"{self.path} has the GGUF architecture {self._header.architecture!r}, which "
                f"transformers {transformers.__version__} does not read: use the model's "
                "safetensors checkpoint"
            ) from error
        except (KeyError, TypeError, IndexError, OSError, NotImplementedError) as error:
            raise CheckpointError(
                f"the config of {self.path} cannot be read ({first_line(error)})"
            ) from error
        return config

    def _read_tokenizer(self) -> TokenizersBackend | None:
        if self._header.metadata.get("tokenizer.ggml.model") in (None, "none", "no_vocab"):
            return None
        with self._alone() as folder:
            return tokenizer_files.read_tokenizer(self.path, folder, gguf_file=_NAME)

    def _more_eos_token_ids(self) -> Iterable[int]:
        values = [self._header.metadata.get(name) for name in _MORE_ENDS]
        return [value for value in values if isinstance(value, int)]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[Path]:
        """The file in a folder of its own: transformers would read configs that lie beside it."""
        with tempfile.TemporaryDirectory(prefix="octavo-gguf-") as folder, self._session.patched():
            (Path(folder) / _NAME).symlink_to(self.path.resolve())
            yield Path(folder)


def _require_whole_file(path: Path, header: GgufHeader) -> None:
    parts = header.metadata.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise UnsupportedModelError(
            f"{path} is one of {parts} parts: merge them with `llama-gguf-split --merge`"
        )


def _require_plain_rotary(path: Path, header: GgufHeader) -> None:
    """Rotary scaling (Llama 3.1, YaRN, LongRoPE) is kept where transformers does not look."""
    found = [tensor.name for tensor in header.tensors if tensor.name in _ROTARY_TENSORS]
    for name, harmless in _ROTARY_VALUES.items():
        value = header.metadata.get(f"{header.architecture}.{name}", harmless[0])
        if value not in harmless:
            found.append(f"{name} {value}")
    if found:
        raise UnsupportedModelError(
            f"{path} rescales its rotary positions ({found[0]}), which transformers does not read "
            "from GGUF: use the model's safetensors checkpoint"
        )
