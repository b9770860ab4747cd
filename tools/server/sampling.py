"""A request's fields as the parameters that the engine samples by."""

from __future__ import annotations

from typing import Any

from octavo.graphs.errors import RequestError
from octavo.runtime.sampling.sampling_params import RequestOutputKind, SamplingParams
from octavo.tools.server.errors import ApiError
from octavo.tools.server.requests import GenerationRequest

# Fields that mean what the parameter of that name means; None stands for its default.
_SAME = (
    "n",
    "temperature",
    "top_p",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "bad_words",
    "allowed_token_ids",
    "skip_special_tokens",
    "speculate",
    "structured_outputs",
)
_SEED_VALUES = 1 << 64


def sampling_params(request: GenerationRequest, **options: Any) -> SamplingParams:
    """RequestError for what `SamplingParams` refuses; `options` win over the request's fields."""
    given = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    if request.seed is not None:
        given["seed"] = request.seed % _SEED_VALUES  # OpenAI's are signed
    if request.stream:
        given["output_kind"] = RequestOutputKind.DELTA
    else:
        given["output_kind"] = RequestOutputKind.FINAL_ONLY
    return SamplingParams(**(given | options))


def check_stream_options(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise ApiError(
            400,
            "stream_options is given and stream is not true: set stream to true or leave it out",
            param="stream_options",
        )


def check_logprobs(name: str, count: int | None, most: int) -> None:
    if count is not None and count > most:
        raise ApiError(
            400, f"{name} is {count}, the server gives at most {most}: lower it", param=name
        )


def check_choices(num_prompts: int, params: SamplingParams, most: int) -> None:
    """Bounds what one request may start."""
    count = num_prompts * params.num_sequences
    if count > most:
        raise RequestError(
            f"the request asks for {count} completions, the server makes at most {most} for one "
            "request: send several"
        )
