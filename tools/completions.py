"""Shows what an engine has generated: as text, piece by piece, or as JSON."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import typer

from octavo.graphs.errors import RequestError

if TYPE_CHECKING:
    from octavo.runtime import LLM, CompletionOutput, RequestOutput, SamplingParams
    from octavo.runtime.outputs import PositionLogprobs
    from octavo.runtime.prompts import Prompt
    from octavo.runtime.sampling.beam_search import BeamSearchParams


def print_results(llm: LLM, results: Sequence[RequestOutput]) -> None:
    """The texts alone where each prompt has one completion, else each under a heading."""
    shown = _shown_as(llm)
    for number, result in enumerate(results, start=1):
        for completion in result.outputs:
            if len(result.outputs) > 1:
                prompt = f"prompt {number}, " if len(results) > 1 else ""
                typer.echo(f"--- {prompt}{_heading(completion, len(result.outputs))}")
            typer.echo(shown(completion))


def print_stream(llm: LLM, prompt: Prompt, params: SamplingParams | BeamSearchParams) -> None:
    """Prints a completion as it grows, and on a terminal how fast it came."""
    shown, printed, last = _shown_as(llm), "", None
    for last in llm.stream(prompt, params):
        text = shown(last.outputs[0])
        sys.stdout.write(text[len(printed) :])
        sys.stdout.flush()
        printed = text
    sys.stdout.write("\n")
    if last is not None and sys.stderr.isatty():
        typer.secho(_summary(last), err=True, dim=True)


def as_json(result: RequestOutput) -> dict[str, Any]:
    """A request with its completions; what was not asked for is null."""
    return {
        "prompt": result.prompt,
        "outputs": [_completion_as_json(completion) for completion in result.outputs],
        "num_cached_tokens": result.num_cached_tokens,
        "metrics": dataclasses.asdict(result.metrics),
    }


def _completion_as_json(completion: CompletionOutput) -> dict[str, Any]:
    logprobs = completion.logprobs
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "cumulative_logprob": _finite(completion.cumulative_logprob),
        "score": _finite(completion.score),
        "logprobs": None if logprobs is None else [_position_as_json(one) for one in logprobs],
    }


def _position_as_json(position: PositionLogprobs) -> list[dict[str, Any]]:
    """The generated token first, then the likeliest ones."""
    return [
        {
            "token_id": token_id,
            "token": one.decoded_token,
            "logprob": _finite(one.logprob),
            "rank": one.rank,
        }
        for token_id, one in position.items()
    ]


def _finite(value: float | None) -> float | None:
    """JSON has no infinity: null stands for the logarithm of a probability of 0."""
    return value if value is not None and math.isfinite(value) else None


def _shown_as(llm: LLM) -> Callable[[CompletionOutput], str]:
    """What to print of a completion: its text, or token ids where there is no tokenizer."""
    try:
        llm.get_tokenizer()
    except RequestError:
        return lambda completion: ",".join(map(str, completion.token_ids))
    return lambda completion: completion.text


def _heading(completion: CompletionOutput, count: int) -> str:
    parts = [f"completion {completion.index + 1} of {count}"]
    if completion.score is not None:
        parts.append(f"score {completion.score:.4f}")
    elif completion.cumulative_logprob is not None:
        parts.append(f"log-probability {completion.cumulative_logprob:.2f}")
    return ", ".join(parts)


def _summary(result: RequestOutput) -> str:
    metrics = result.metrics
    parts = [f"{len(result.outputs[0].token_ids)} tokens"]
    if metrics.time_to_first_token is not None:
        parts.append(f"the first after {metrics.time_to_first_token * 1e3:.0f} ms")
    if metrics.time_per_output_token:
        parts.append(f"then {1 / metrics.time_per_output_token:.0f} a second")
    return ", ".join(parts)
