"""A request as it comes from the stub, and the outputs as its tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from octavo.graphs.errors import RequestError
from octavo.runtime import (
    BeamSearchParams,
    CompletionOutput,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from octavo.runtime.outputs import PositionLogprobs
from octavo.tools.triton.stub import tensors

_BEAM_WIDTH = "beam_width"
# What a request cannot give: functions, and what `stream` decides.
_OWN = {"logits_processors", "output_kind"}
_DEFAULT_MAX_TOKENS = SamplingParams().max_tokens


def read_params(
    given: Mapping[str, Any], *, stream: bool, returns: Sequence[str]
) -> SamplingParams | BeamSearchParams:
    """RequestError for a name that is none of the parameters, or a value that is refused."""
    values = dict(given)
    beam_search = values.get(_BEAM_WIDTH) not in (None, 1)
    if not beam_search:
        values.pop(_BEAM_WIDTH, None)
    kind = BeamSearchParams if beam_search else SamplingParams
    scalars = {
        field.name: str(field.type).partition(" ")[0] in ("int", "float", "bool")
        for field in fields(kind)
        if field.name not in _OWN
    }
    for name, value in values.items():
        if name not in scalars:
            raise RequestError(
                f"{name!r} is no {'beam search' if beam_search else 'sampling'} parameter: "
                f"choose from {', '.join(scalars)}"
            )
        if scalars[name] and isinstance(value, str):
            values[name] = _number(value)
    if beam_search:
        return BeamSearchParams(**{"max_tokens": _DEFAULT_MAX_TOKENS, **values})
    if tensors.LOGPROBS.name in returns or tensors.CUMULATIVE_LOGPROB.name in returns:
        values.setdefault("logprobs", 0)  # of the chosen tokens: asked for, so computed
    whole = not stream or values.get("best_of") not in (None, values.get("n", 1))
    output_kind = RequestOutputKind.FINAL_ONLY if whole else RequestOutputKind.DELTA
    return SamplingParams(output_kind=output_kind, **values)


class Responses:
    """Turns the outputs of one request into the values of its output tensors.

    prefix  put before the text of every completion
    """

    def __init__(self, num_completions: int, returns: Sequence[str], prefix: str) -> None:
        self._returns = returns
        self._prefixes = [prefix] * num_completions
        self._cumulative_logprobs = [0.0] * num_completions

    def tensors(self, output: RequestOutput) -> dict[str, list[Any]]:
        """By the tensor's name; of each completion what is new, "" or [] where nothing is."""
        texts = [""] * len(self._prefixes)
        completions: list[CompletionOutput | None] = [None] * len(self._prefixes)
        for completion in output.outputs:
            index = completion.index
            completions[index] = completion
            texts[index] = self._prefixes[index] + completion.text
            self._prefixes[index] = ""
            if completion.cumulative_logprob is not None:
                self._cumulative_logprobs[index] = completion.cumulative_logprob
        values: dict[str, list[Any]] = {
            tensors.FINISH_REASON.name: [(one and one.finish_reason) or "" for one in completions],
            tensors.CUMULATIVE_LOGPROB.name: self._cumulative_logprobs,
            tensors.LOGPROBS.name: [_logprobs(one.logprobs if one else []) for one in completions],
            tensors.NUM_INPUT_TOKENS.name: [len(output.prompt_token_ids)],
            tensors.NUM_OUTPUT_TOKENS.name: [
                len(one.token_ids) if one else 0 for one in completions
            ],
            tensors.TOKEN_IDS.name: [
                json.dumps(one.token_ids if one else []) for one in completions
            ],
        }
        return {tensors.TEXT_OUTPUT.name: texts, **{name: values[name] for name in self._returns}}


def _number(text: str) -> Any:
    """Clients of Triton's vLLM backend send numbers as texts; what is none stays a text."""
    try:
        value = json.loads(text.lower())
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, int | float) else text


def _logprobs(positions: list[PositionLogprobs] | None) -> str:
    return json.dumps(
        [
            {
                token_id: {
                    "logprob": one.logprob,
                    "rank": one.rank,
                    "decoded_token": one.decoded_token,
                }
                for token_id, one in position.items()
            }
            for position in positions or []
        ]
    )
