"""EAGLE checkpoints as SafeAILab/EAGLE writes them: a one-layer Llama with `fc`.

The embedding may be left out, then it is the target's; the output embedding always is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from octavo.compiler.drafters.base import ModuleCheckpoint, TargetFacts, TargetWeights
from octavo.compiler.drafters.drafter_config import DrafterConfig, check_fits
from octavo.compiler.drafters.llama_config import attention_shapes, mlp_shapes, read_llama_config
from octavo.compiler.drafters.tensors import TensorFolder
from octavo.compiler.drafters.unread import refuse_other_settings, refuse_unread_tensors
from octavo.graphs.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from octavo.compiler.hidden_states import CaptureHidden
    from octavo.graphs.drafters.eagle import Eagle
    from octavo.graphs.spec import SpeculativeMethod

_PREFIX = "model."
_EMBEDDING = "embed_tokens.weight"
_SETTINGS = {"mlp_bias": False, "logit_scale": 1.0}
_TARGETS = ("lm_head.weight", "model.lm_head.weight")  # some store it, all use the target's


def open_eagle(model: str, target: TargetFacts) -> EagleCheckpoint:
    """Raises CheckpointError, with names and sizes, for what does not fit the target."""
    return EagleCheckpoint(Path(model).expanduser(), target)


class EagleCheckpoint(ModuleCheckpoint):
    method: SpeculativeMethod = "eagle"

    def __init__(self, path: Path, target: TargetFacts) -> None:
        self.path = path
        self._target = target
        own = DrafterConfig(path)
        self._config, content = read_llama_config(path)
        refuse_other_settings(path, content, _SETTINGS)
        check_fits(
            path,
            target,
            hidden_size=self._config.hidden_size,
            vocab_size=self._config.vocab_size if "vocab_size" in content else None,
        )
        if self._num_layers < 1:
            raise CheckpointError(
                f"{path} has {self._num_layers} layers, an EAGLE drafter has at least 1: choose "
                "another drafter"
            )
        self._tensors = TensorFolder(path)
        stored = self._tensors.tensors
        self._prefix = "" if "fc.weight" in stored else _PREFIX
        self._has_bias = own.flag("bias") or f"{self._prefix}fc.bias" in stored
        self._has_embedding = f"{self._prefix}{_EMBEDDING}" in stored
        shapes = {f"{self._prefix}{name}": shape for name, shape in self._shapes().items()}
        owner = f"an EAGLE drafter of {self._num_layers} layers"
        self._tensors.require(shapes, owner)
        refuse_unread_tensors(self._tensors, (*shapes, *_TARGETS), owner)

    def content_digest(self) -> str:
        return self._tensors.content_digest(self.path / "config.json")

    def hidden(self) -> CaptureHidden:
        from octavo.compiler.hidden_states import CaptureHidden

        return CaptureHidden(rows="all", source="post_norm")

    def load_module(self, target: TargetWeights, dtype: torch.dtype) -> Eagle:
        from octavo.compiler.drafters.assembly import with_weights
        from octavo.graphs.drafters.eagle import Eagle

        vocab_size, has_bias = self._target.vocab_size, self._has_bias
        loaded = self._tensors.load((self._prefix + name for name in self._shapes()), dtype)
        state = {name.removeprefix(self._prefix): tensor for name, tensor in loaded.items()}
        state.setdefault(_EMBEDDING, target.embedding.to(dtype))
        state["lm_head.weight"] = target.head.to(dtype)
        return with_weights(
            lambda: Eagle(self._config, vocab_size=vocab_size, fc_bias=has_bias), state
        )

    @property
    def _num_layers(self) -> int:
        return int(self._config.num_hidden_layers)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        size = self._config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, 2 * size)}
        if self._has_bias:
            shapes["fc.bias"] = (size,)
        if self._has_embedding:
            shapes[_EMBEDDING] = (self._target.vocab_size, size)
        for layer in range(self._num_layers):
            prefix = f"layers.{layer}."
            shapes |= attention_shapes(self._config, prefix, size)
            shapes |= mlp_shapes(self._config, prefix)
            if layer:
                shapes[f"{prefix}input_layernorm.weight"] = (size,)
        return shapes
