"""MLP speculators as IBM publishes them: fms-extras' modules behind `speculator.`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from octavo.compiler.drafters.base import ModuleCheckpoint, TargetFacts, TargetWeights
from octavo.compiler.drafters.drafter_config import DrafterConfig, check_fits
from octavo.compiler.drafters.tensors import TensorFolder
from octavo.graphs.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from octavo.compiler.hidden_states import CaptureHidden
    from octavo.graphs.drafters.mlp_speculator import MLPSpeculator
    from octavo.graphs.spec import SpeculativeMethod

_PREFIX = "speculator."
_RECURRENCE = "sum_rnn"


def open_mlp_speculator(
    model: str, target: TargetFacts, num_drafts: int | None = None
) -> MLPSpeculatorCheckpoint:
    """Raises CheckpointError, with names and sizes, for what does not fit the target.

    num_drafts  stages that are wanted, the first ones; None for all
    """
    return MLPSpeculatorCheckpoint(Path(model).expanduser(), target, num_drafts)


class MLPSpeculatorCheckpoint(ModuleCheckpoint):
    method: SpeculativeMethod = "mlp_speculator"

    def __init__(self, path: Path, target: TargetFacts, num_drafts: int | None) -> None:
        self.path = path
        self._num_drafts = num_drafts
        self._config = DrafterConfig(path)
        recurrence = self._config.text("method", _RECURRENCE)
        if recurrence != _RECURRENCE:
            raise CheckpointError(
                f"{path} is a speculator of method {recurrence!r} and only {_RECURRENCE!r}, that "
                "of IBM's accelerators, is known: choose another drafter"
            )
        self._n_predict = self._config.required_integer("n_predict")
        hidden_size = self._config.integer("emb_dim", "hidden_size", least=0) or target.hidden_size
        self._inner_size = self._config.integer("inner_dim", least=0) or hidden_size
        self._is_tied = self._config.flag("tie_weights", "tie_wts")
        self.max_draft_tokens = self._n_predict
        check_fits(
            path, target, hidden_size=hidden_size, vocab_size=self._config.integer("vocab_size")
        )
        self._target = target
        self._tensors = TensorFolder(path)
        self._prefix = "" if "emb.0.weight" in self._tensors.tensors else _PREFIX
        shapes = {
            self._prefix + name: shape for name, shape in self._shapes(self._n_predict).items()
        }
        self._tensors.require(shapes, f"an MLP speculator of {self._n_predict} stages")

    def content_digest(self) -> str:
        return self._tensors.content_digest(self._config.path)

    def hidden(self) -> CaptureHidden:
        from octavo.compiler.hidden_states import CaptureHidden

        return CaptureHidden(rows="logits", source="post_norm")

    def load_module(self, target: TargetWeights, dtype: torch.dtype) -> MLPSpeculator:
        import torch

        from octavo.graphs.drafters.mlp_speculator import MLPSpeculator

        num_heads = min(self._num_drafts or self._n_predict, self._n_predict)
        with torch.device("meta"):
            module = MLPSpeculator(
                hidden_size=self._target.hidden_size,
                inner_size=self._inner_size,
                vocab_size=self._target.vocab_size,
                n_predict=self._n_predict,
                num_heads=num_heads,
                is_tied=self._is_tied,
                scales_input=self._config.flag("scale_input"),
            )
        names = self._shapes(num_heads)
        loaded = self._tensors.load((self._prefix + name for name in names), dtype)
        module.load_state_dict({name: loaded[self._prefix + name] for name in names}, assign=True)
        return module.eval()

    def _shapes(self, num_heads: int) -> dict[str, tuple[int, ...]]:
        """Of the module's tensors, of the first stages; tied ones are stored as the first's."""
        inner, hidden_size = self._inner_size, self._target.hidden_size
        vocab_size = self._target.vocab_size
        shapes: dict[str, tuple[int, ...]] = {}
        for stage in range(num_heads):
            if stage == 0 or not self._is_tied:
                shapes |= {
                    f"emb.{stage}.weight": (vocab_size, inner),
                    f"head.{stage}.weight": (vocab_size, inner),
                    f"ln.{stage}.weight": (inner,),
                    f"ln.{stage}.bias": (inner,),
                }
            if stage < 2 or not self._is_tied:
                shapes[f"proj.{stage}.weight"] = (inner, inner if stage else hidden_size)
        return shapes
