"""Medusa checkpoints, as FasterDecoding/Medusa writes them and as vLLM reads them.

FasterDecoding: medusa_lm_head.safetensors with `{head}.{layer}.linear.weight` and `.bias` and
`{head}.{num_layers}.weight`, or the same behind `medusa_head.` in the file of the whole model.
vLLM: model.safetensors with `blocks.{head}.layers.{layer}.weight`, `lm_heads.{head}.weight` and,
where only frequent tokens are drafted, `token_map`.

Configs are not to be trusted with the number of heads: published ones say 2 and have 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.compiler.drafters.base import ModuleCheckpoint, TargetFacts, TargetWeights
from octavo.compiler.drafters.drafter_config import DrafterConfig, check_fits
from octavo.compiler.drafters.tensors import TensorFolder
from octavo.graphs.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo.compiler.hidden_states import CaptureHidden
    from octavo.graphs.drafters.medusa import Medusa
    from octavo.graphs.spec import SpeculativeMethod

_FILE = "medusa_lm_head.safetensors"
_PREFIXES = ("", "medusa_head.", "medusa_heads.")
_SHARED_LM_HEADS = ("lm_heads.0.weight", "lm_head.weight")
_TOKEN_MAP = "token_map"


@dataclass(frozen=True)
class _Names:
    """How a checkpoint names its tensors."""

    prefix: str
    is_original: bool

    def layer(self, head: int, layer: int) -> str:
        if self.is_original:
            return f"{self.prefix}{head}.{layer}.linear"
        return f"{self.prefix}blocks.{head}.layers.{layer}"

    def lm_head(self, head: int, num_layers: int) -> str:
        if self.is_original:
            return f"{self.prefix}{head}.{num_layers}.weight"
        return f"{self.prefix}lm_heads.{head}.weight"


def open_medusa(model: str, target: TargetFacts, num_drafts: int | None = None) -> MedusaCheckpoint:
    """Raises CheckpointError, with names and sizes, for what does not fit the target.

    num_drafts  heads that are wanted, the first ones; None for all
    """
    return MedusaCheckpoint(Path(model).expanduser(), target, num_drafts)


class MedusaCheckpoint(ModuleCheckpoint):
    method: SpeculativeMethod = "medusa"

    def __init__(self, path: Path, target: TargetFacts, num_drafts: int | None) -> None:
        self.path = path
        self._num_drafts = num_drafts
        self._config = DrafterConfig(path)
        self._tensors = TensorFolder(path, _file_name(path))
        self._target = target
        self._names = self._find_names()
        # `num_hidden_layers` may be the target's, where both are in one folder.
        layers = self._config.integer("medusa_num_layers", "num_medusa_layers", "num_hidden_layers")
        self._num_layers = 1 if layers is None else layers
        self._num_heads = self._count_heads()
        self.max_draft_tokens = self._num_heads
        self._lm_heads = self._find_lm_heads()
        self._num_head_tokens = self._count_head_tokens()
        self._check_fits()
        self._tensors.require(
            self._expected_shapes(), f"{self._num_heads} Medusa heads (layers: {self._num_layers})"
        )

    def content_digest(self) -> str:
        return self._tensors.content_digest(self._config.path)

    def hidden(self) -> CaptureHidden:
        from octavo.compiler.hidden_states import CaptureHidden

        return CaptureHidden(rows="logits", source="post_norm")

    def load_module(self, target: TargetWeights, dtype: torch.dtype) -> Medusa:
        import torch

        from octavo.graphs.drafters.medusa import Medusa

        num_heads = min(self._num_drafts or self._num_heads, self._num_heads)
        with torch.device("meta"):
            module = Medusa(
                hidden_size=self._target.hidden_size,
                vocab_size=self._target.vocab_size,
                num_heads=num_heads,
                num_layers=self._num_layers,
                bias=self._has_bias,
                shares_lm_head=self._shares_lm_head,
                num_head_tokens=self._num_head_tokens,
                logit_scale=self._config.number("logit_scale", 1.0),
            )
        weights = self._weights(num_heads)
        loaded = self._tensors.load(weights.values(), dtype)
        state = {own: loaded[stored] for own, stored in weights.items()}
        if not self._lm_heads:
            state["lm_heads.0.weight"] = target.head.to(dtype)
        if self._is_truncated:
            self._truncate(state)
        module.load_state_dict(state, assign=True)
        return module.eval()

    @property
    def _shares_lm_head(self) -> bool:
        return len(self._lm_heads) < 2

    @property
    def _is_truncated(self) -> bool:
        return self._num_head_tokens < self._target.vocab_size

    @property
    def _has_bias(self) -> bool:
        if self._names.is_original or self._config.flag("medusa_fc_bias"):
            return True
        return f"{self._names.layer(0, 0)}.bias" in self._tensors.tensors

    def _find_names(self) -> _Names:
        stored = self._tensors.tensors
        for is_original in (True, False):
            for prefix in _PREFIXES:
                names = _Names(prefix, is_original)
                if f"{names.layer(0, 0)}.weight" in stored:
                    return names
        # Nothing of the kind is there: these are the names that will be missed.
        return _Names("", is_original=not self._config.has("num_heads"))

    def _count_heads(self) -> int:
        found = 0
        while f"{self._names.layer(found, 0)}.weight" in self._tensors.tensors:
            found += 1
        named = self._config.integer("medusa_num_heads", "num_medusa_heads", "num_heads")
        return max(found, 1 if named is None else named)

    def _find_lm_heads(self) -> list[str]:
        """The stored output embeddings: one for each head, one for all, none for the target's."""
        stored = self._tensors.tensors
        own = [self._names.lm_head(head, self._num_layers) for head in range(self._num_heads)]
        if self._config.flag("original_lm_head"):
            prefix = self._names.prefix
            return [name for one in _SHARED_LM_HEADS if (name := prefix + one) in stored][:1]
        return own if any(name in stored for name in own) else []

    def _count_head_tokens(self) -> int:
        """The tokens that are drafted, all of the vocabulary if nothing says otherwise."""
        vocab_size = self._target.vocab_size
        most = self._config.integer("vocab_size") or vocab_size
        truncated = self._config.integer("truncated_vocab_size") or most
        return vocab_size if truncated == most else truncated

    def _check_fits(self) -> None:
        layer = self._tensors.shape(f"{self._names.layer(0, 0)}.weight")
        lm_head = self._tensors.shape(self._lm_heads[0]) if self._lm_heads else None
        vocab_size = self._config.integer("vocab_size")
        if lm_head and not self._is_truncated:
            vocab_size = vocab_size or lm_head[0]
        check_fits(
            self.path,
            self._target,
            hidden_size=self._config.integer("hidden_size") or (layer[-1] if layer else None),
            vocab_size=vocab_size,
        )
        if self._num_head_tokens > self._target.vocab_size:
            raise CheckpointError(
                f"{self._config.path} has truncated_vocab_size {self._num_head_tokens} of a "
                f"vocabulary of {self._target.vocab_size} tokens: download it again"
            )

    def _weights(self, num_heads: int) -> dict[str, str]:
        """The stored tensor of each of the module's, of the first heads."""
        parts = ("weight", "bias") if self._has_bias else ("weight",)
        placed = {
            f"blocks.{head}.layers.{layer}.{part}": f"{self._names.layer(head, layer)}.{part}"
            for head in range(num_heads)
            for layer in range(self._num_layers)
            for part in parts
        }
        lm_heads = enumerate(self._lm_heads[:num_heads])
        return placed | {f"lm_heads.{head}.weight": stored for head, stored in lm_heads}

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden_size = self._target.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        for own, stored in self._weights(self._num_heads).items():
            if own.startswith("lm_heads."):
                # A truncated one may come whole: the token map chooses its rows then.
                found = self._tensors.shape(stored)
                whole = found is not None and found[0] == self._target.vocab_size
                rows = self._target.vocab_size if whole else self._num_head_tokens
                shapes[stored] = (rows, hidden_size)
            else:
                square = own.endswith(".weight")
                shapes[stored] = (hidden_size, hidden_size) if square else (hidden_size,)
        if self._is_truncated:
            shapes[self._names.prefix + _TOKEN_MAP] = (self._num_head_tokens,)
        return shapes

    def _truncate(self, state: dict[str, Tensor]) -> None:
        """Leaves the rows of the drafted tokens, and says where each token's row is."""
        import torch

        vocab_size = self._target.vocab_size
        name = self._names.prefix + _TOKEN_MAP
        token_map = self._tensors.load([name])[name].long()
        if not bool(((token_map >= 0) & (token_map < vocab_size)).all()):
            raise CheckpointError(
                f"{self.path} has a token_map with ids outside the vocabulary of {vocab_size} "
                "tokens: get the drafter that was made for this model"
            )
        for own, tensor in state.items():
            if own.startswith("lm_heads.") and len(tensor) == vocab_size:
                state[own] = tensor[token_map]
        columns = torch.full((vocab_size,), self._num_head_tokens)
        columns[token_map] = torch.arange(self._num_head_tokens)
        state["columns"] = columns


def _file_name(folder: Path) -> str | None:
    """The name of the original format's file, if it or only its pickle is there."""
    whole_model = any(folder.glob("model*.safetensors"))
    return None if whole_model and not (folder / _FILE).is_file() else _FILE
