"""EAGLE-3 checkpoints as SafeAILab/EAGLE writes them and as vLLM reads them.

`fc` fuses hidden states of three layers of the target, which becomes part of the target's graph.
`d2t` [drafted tokens] is what is to be added to a drafted token's row to get its id.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.compiler.drafters.base import ModuleCheckpoint, TargetFacts, TargetWeights
from octavo.compiler.drafters.drafter_config import DrafterConfig, check_fits
from octavo.compiler.drafters.llama_config import attention_shapes, mlp_shapes, read_llama_config
from octavo.compiler.drafters.tensors import TensorFolder
from octavo.compiler.drafters.unread import refuse_other_settings, refuse_unread_tensors
from octavo.graphs.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo.compiler.hidden_states import CaptureHidden
    from octavo.graphs.drafters.eagle3 import Eagle3
    from octavo.graphs.spec import SpeculativeMethod

_EMBEDDING = "embed_tokens.weight"
_LAYERS = ("midlayer.", "layers.0.", "model.midlayer.", "model.layers.0.")
_PREFIX = "model."
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_SETTINGS = {"mlp_bias": False, "logit_scale": 1.0, "norm_before_fc": False, "norm_output": False}


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """Whose inputs are fused unless the drafter's config names others."""
    return 2, num_layers // 2, num_layers - 3


def open_eagle3(model: str, target: TargetFacts) -> Eagle3Checkpoint:
    """Raises CheckpointError, with names and sizes, for what does not fit the target."""
    return Eagle3Checkpoint(Path(model).expanduser(), target)


class Eagle3Checkpoint(ModuleCheckpoint):
    method: SpeculativeMethod = "eagle3"

    def __init__(self, path: Path, target: TargetFacts) -> None:
        self.path = path
        self._target = target
        own = DrafterConfig(path)
        self._config, content = read_llama_config(path)
        eagle_config = content.get("eagle_config") or {}
        refuse_other_settings(path, content, _SETTINGS)
        refuse_other_settings(path, eagle_config, {"use_aux_hidden_state": True})
        self._norms_residual = own.flag("norm_before_residual")
        self._layers = self._find_layers(eagle_config.get(_LAYER_IDS) or content.get(_LAYER_IDS))
        check_fits(
            path,
            target,
            hidden_size=own.integer("target_hidden_size") or self._config.hidden_size,
            vocab_size=self._config.vocab_size if "vocab_size" in content else None,
        )
        if self._config.num_hidden_layers != 1:
            raise CheckpointError(
                f"{path} has {self._config.num_hidden_layers} layers, an EAGLE-3 drafter has 1: "
                "choose another drafter"
            )
        self._tensors = TensorFolder(path)
        stored = self._tensors.tensors
        self._prefix = _PREFIX if f"{_PREFIX}fc.weight" in stored else ""
        self._layer = next(
            (name for name in _LAYERS if f"{name}hidden_norm.weight" in stored), _LAYERS[0]
        )
        self._num_head_tokens = own.integer("draft_vocab_size") or target.vocab_size
        if self._num_head_tokens > target.vocab_size:
            raise CheckpointError(
                f"{path} drafts {self._num_head_tokens} tokens (draft_vocab_size) and "
                f"{target.checkpoint.path} has {target.vocab_size}: get the drafter that was made "
                "for this model"
            )
        self._has_embedding = f"{self._prefix}{_EMBEDDING}" in stored
        expected = {self._stored(name): shape for name, shape in self._shapes().items()}
        if self._is_truncated:
            expected["d2t"] = (self._num_head_tokens,)
        expected[f"{self._prefix}fc.weight"] = self._fc_shape
        self._tensors.require(expected, "an EAGLE-3 drafter")
        refuse_unread_tensors(self._tensors, (*expected, "d2t"), "an EAGLE-3 drafter")

    def content_digest(self) -> str:
        return self._tensors.content_digest(self.path / "config.json")

    def hidden(self) -> CaptureHidden:
        import torch
        from torch import nn

        from octavo.compiler.hidden_states import CaptureHidden

        name = f"{self._prefix}fc.weight"
        rows, columns = self._fc_shape
        with torch.device("meta"):
            projection = nn.Linear(columns, rows, bias=False)
        weight = self._tensors.load([name], torch.float32)[name]
        projection.load_state_dict({"weight": weight}, assign=True)
        return CaptureHidden(
            rows="all", source="layers", layers=self._layers, projection=projection.eval()
        )

    def load_module(self, target: TargetWeights, dtype: torch.dtype) -> Eagle3:
        from octavo.compiler.drafters.assembly import with_weights
        from octavo.graphs.drafters.eagle3 import Eagle3

        names = {self._stored(name): name for name in self._shapes()}
        loaded = self._tensors.load(names, dtype)
        state = {names[stored]: tensor for stored, tensor in loaded.items()}
        state.setdefault(_EMBEDDING, target.embedding.to(dtype))
        if self._is_truncated:
            state["columns"] = self._columns()
        return with_weights(
            lambda: Eagle3(
                self._config,
                vocab_size=self._target.vocab_size,
                num_head_tokens=self._num_head_tokens,
                norms_residual=self._norms_residual,
            ),
            state,
        )

    @property
    def _is_truncated(self) -> bool:
        return self._num_head_tokens < self._target.vocab_size

    @property
    def _fc_shape(self) -> tuple[int, int]:
        return self._config.hidden_size, len(self._layers) * self._target.hidden_size

    def _find_layers(self, named: Any) -> tuple[int, ...]:
        """Those that the config names, else the default ones."""
        layers = named or default_layers(self._target.num_layers)
        if not isinstance(layers, list | tuple) or not all(type(one) is int for one in layers):
            raise CheckpointError(
                f"{self.path} has {_LAYER_IDS} = {json.dumps(named)} where a list of layers "
                "belongs: download it again"
            )
        found = tuple(layers)
        wrong = [layer for layer in found if not 0 <= layer < self._target.num_layers]
        if wrong:
            raise CheckpointError(
                f"{self.path} reads what goes into layer {wrong[0]} and "
                f"{self._target.checkpoint.path} has {self._target.num_layers} layers: get the "
                "drafter that was made for this model"
            )
        return found

    def _stored(self, name: str) -> str:
        """The stored name of one of the module's tensors."""
        if name.startswith("midlayer."):
            return self._layer + name.removeprefix("midlayer.")
        return name if name.startswith("lm_head.") else self._prefix + name

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the module's tensors that are stored."""
        size = self._config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "midlayer.hidden_norm.weight": (size,),
            "midlayer.input_layernorm.weight": (size,),
            **attention_shapes(self._config, "midlayer.", 2 * size),
            **mlp_shapes(self._config, "midlayer."),
            "norm.weight": (size,),
            "lm_head.weight": (self._num_head_tokens, size),
        }
        if self._config.attention_bias:
            shapes["midlayer.self_attn.o_proj.bias"] = (size,)
        if self._has_embedding or size != self._target.hidden_size:
            shapes[_EMBEDDING] = (self._target.vocab_size, size)
        return shapes

    def _columns(self) -> Tensor:
        """[V] i64: the row of each token in the output embedding, one past the last for none."""
        import torch

        count, vocab_size = self._num_head_tokens, self._target.vocab_size
        token_ids = torch.arange(count) + self._tensors.load(["d2t"])["d2t"].long()
        if not bool(((token_ids >= 0) & (token_ids < vocab_size)).all()):
            raise CheckpointError(
                f"{self.path} has a d2t with ids outside the vocabulary of {vocab_size} tokens: "
                "get the drafter that was made for this model"
            )
        columns = torch.full((vocab_size,), count)
        columns[token_ids] = torch.arange(count)
        return columns
