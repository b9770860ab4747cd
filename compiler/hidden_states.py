"""Hidden states of a model, tapped while its own code runs, for drafters to read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo.graphs.errors import UnsupportedModelError
from octavo.graphs.spec import HiddenStatesSpec

_FINAL_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "final_norm")


@dataclass(frozen=True)
class CaptureHidden:
    """What a drafter wants of its target's graph; see `HiddenStatesSpec` for the fields.

    `projection` joins the states of several layers, [T, layers * h] -> [T, h].
    """

    rows: Literal["logits", "all"]
    source: Literal["post_norm", "pre_norm", "layers"]
    layers: tuple[int, ...] = ()
    projection: nn.Linear | None = None

    def spec(self, hidden_size: int) -> HiddenStatesSpec:
        size = hidden_size * max(1, len(self.layers))
        if self.projection is not None:
            size = self.projection.out_features
        return HiddenStatesSpec(rows=self.rows, source=self.source, layers=self.layers, size=size)


class HiddenStatesTap(nn.Module):
    """Keeps what passes through a model's modules during one forward pass."""

    def __init__(self, model: PreTrainedModel, wanted: CaptureHidden) -> None:
        super().__init__()
        self.projection = wanted.projection
        self._wanted = wanted
        self._model = [model]  # in a list: it is not this module's own
        self._seen: list[Tensor] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While the model runs once, under these hooks."""
        self._seen = []
        with ExitStack() as stack:
            for handle in self._hooks():
                stack.callback(handle.remove)
            yield

    def read(self, rows: Tensor | None) -> Tensor:
        """f32 [L, F] or [T, F] of the pass that was listened to; `rows` i64 [L] of T.

        `rows` is None where the model has chosen the rows of its logits itself.
        """
        hidden = self.read_all()[0]
        if self.projection is not None:
            hidden = self.projection(hidden.to(self.projection.weight.dtype))
        if self._wanted.rows == "logits" and rows is not None:
            hidden = hidden[rows]
        return hidden.float()

    def read_all(self) -> Tensor:
        """[B, T, layers * h] of the pass that was listened to, as the modules passed it."""
        seen, self._seen = self._seen, []
        if len(seen) != max(1, len(self._wanted.layers)):
            raise UnsupportedModelError(
                f"{type(self._model[0]).__name__} does not pass its hidden states where a drafter "
                "reads them: build without --speculative"
            )
        return torch.cat(seen, dim=-1) if len(seen) > 1 else seen[0]

    def _hooks(self) -> list[Any]:
        model: Any = self._model[0]
        if self._wanted.source == "layers":
            layers = decoder_layers(model.get_decoder())
            return [self._before(layers[index]) for index in self._wanted.layers]
        if self._wanted.source == "pre_norm":
            return [self._before(_final_norm(model.get_decoder()))]
        if self._wanted.rows == "logits":
            return [self._before(model.get_output_embeddings())]
        return [_final_norm(model.get_decoder()).register_forward_hook(self._keep_result)]

    def _before(self, module: nn.Module) -> Any:
        return module.register_forward_pre_hook(self._keep_input, with_kwargs=True)

    def _keep_input(self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._seen.append(cast(Tensor, given[0] if given else named["hidden_states"]))

    def _keep_result(self, _: nn.Module, __: tuple[Any, ...], result: Any) -> None:
        self._seen.append(cast(Tensor, result))


def decoder_layers(decoder: nn.Module) -> nn.ModuleList:
    """The longest list of modules that a decoder holds itself."""
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
    if not lists:
        raise UnsupportedModelError(
            f"{type(decoder).__name__} keeps its layers in no list, so hidden states between them "
            "cannot be read: choose another drafter"
        )
    return max(lists, key=len)


def _final_norm(decoder: nn.Module) -> nn.Module:
    for name in _FINAL_NORMS:
        norm = getattr(decoder, name, None)
        if isinstance(norm, nn.Module):
            return norm
    raise UnsupportedModelError(
        f"{type(decoder).__name__} has no final norm under the names {', '.join(_FINAL_NORMS)}, "
        "whose hidden states a drafter reads: choose another drafter"
    )
