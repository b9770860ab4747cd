"""Messages as msgpack: arrays of a kind and the fields in the order of their declaration."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import asdict, fields
from operator import attrgetter
from typing import Any

import msgpack
import numpy as np

from octavo.graphs import errors
from octavo.runtime.invariants import InvariantError
from octavo.runtime.metrics.request_metrics import RequestMetrics
from octavo.runtime.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from octavo.runtime.sampling.beam_search import BeamSearchParams
from octavo.runtime.sampling.sampling_params import SamplingParams
from octavo.runtime.sampling.structured_outputs import StructuredOutputsParams
from octavo.runtime.serving import messages
from octavo.runtime.serving.messages import Command, Event, Outcome

_COMMANDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        messages.AddRequest,
        messages.AbortRequest,
        messages.PinPrefix,
        messages.ReleasePin,
        messages.ResetPrefixCache,
        messages.ReadMetrics,
        messages.Shutdown,
    )
}
_PARAMS: dict[str, type[Any]] = {kind.__name__: kind for kind in (SamplingParams, BeamSearchParams)}
# Every token passes through these: found once, not by name each time.
_metrics_values = attrgetter(*(field.name for field in fields(RequestMetrics)))
_completion_values = attrgetter(*(field.name for field in fields(CompletionOutput)))
_LOGPROBS = [field.name for field in fields(CompletionOutput)].index("logprobs")
_LARGE_INTEGER = 1  # the code of msgpack's extension type for what 64 bits cannot hold


def pack(value: Any) -> bytes:
    """Plain values as bytes: every int, and texts with whatever a Python str may hold."""
    packed: bytes = msgpack.packb(value, default=_plain, unicode_errors="surrogatepass")
    return packed


def unpack(data: bytes) -> Any:
    """What `pack` was given, tuples as lists."""
    return msgpack.unpackb(
        data, ext_hook=_large_integer, unicode_errors="surrogatepass", strict_map_key=False
    )


def encode_command(command: Command) -> bytes:
    values = _values(command)
    if isinstance(command, messages.AddRequest):
        values[3] = _pack_params(command.params)
    return pack([type(command).__name__, *values])


def decode_command(data: bytes) -> Command:
    """Raises what the parameters of a request raise if they are not as the sender checked them."""
    kind, *values = unpack(data)
    if kind == messages.AddRequest.__name__:
        values[3] = _unpack_params(values[3])
    command: Command = _COMMANDS[kind](*values)
    return command


def encode_event(event: Event) -> bytes:
    name = type(event).__name__
    match event:
        case messages.Started(bundle):
            return pack([name, bundle])
        case messages.StartFailed(error) | messages.Failed(error):
            return pack([name, _pack_error(error)])
        case messages.Reply(key, value, error):
            return pack([name, key, value, _pack_error(error)])
        case messages.Progress(outcomes, metrics):
            return pack([name, [_pack_outcome(outcome) for outcome in outcomes], metrics])


def decode_event(data: bytes) -> Event:
    name, *values = unpack(data)
    match name:
        case messages.Started.__name__:
            return messages.Started(*values)
        case messages.StartFailed.__name__:
            return messages.StartFailed(_unpack_error(values[0]))
        case messages.Failed.__name__:
            return messages.Failed(_unpack_error(values[0]))
        case messages.Reply.__name__:
            key, value, error = values
            return messages.Reply(key, value, None if error is None else _unpack_error(error))
        case messages.Progress.__name__:
            outcomes, metrics = values
            return messages.Progress([_unpack_outcome(outcome) for outcome in outcomes], metrics)
    raise AssertionError(f"the engine sent a message of the unknown kind {name!r}")


def _pack_params(params: SamplingParams | BeamSearchParams) -> list[Any]:
    """Most fields of most requests have their defaults and stay here."""
    kind = SamplingParams if isinstance(params, SamplingParams) else BeamSearchParams
    given = {
        field.name: value
        for field in fields(kind)
        if (value := getattr(params, field.name)) != field.default
    }
    return [kind.__name__, given]


def _unpack_params(packed: list[Any]) -> SamplingParams | BeamSearchParams:
    kind, given = packed
    params: SamplingParams | BeamSearchParams = _PARAMS[kind](**given)
    return params


def _pack_outcome(outcome: Outcome) -> list[Any]:
    key, result = outcome
    if isinstance(result, Exception):
        return [key, _pack_error(result)]
    return [
        key,
        None,
        result.finished,
        result.num_cached_tokens,
        _metrics_values(result.metrics),
        [_pack_completion(completion) for completion in result.outputs],
        _pack_logprobs(result.prompt_logprobs),
        _pack_error(result.error),
    ]


def _unpack_outcome(packed: list[Any]) -> Outcome:
    """The prompt is left out: who has sent it knows it."""
    key, failure, *values = packed
    if failure is not None:
        return key, _unpack_error(failure)
    finished, num_cached_tokens, metrics, completions, prompt_logprobs, error = values
    return key, RequestOutput(
        request_id=str(key),
        prompt=None,
        prompt_token_ids=[],
        outputs=[_unpack_completion(completion) for completion in completions],
        finished=finished,
        num_cached_tokens=num_cached_tokens,
        metrics=RequestMetrics(*metrics),
        prompt_logprobs=_unpack_logprobs(prompt_logprobs),
        error=_unpack_failure(error),
    )


def _pack_completion(completion: CompletionOutput) -> list[Any]:
    values = list(_completion_values(completion))
    if completion.logprobs is not None:
        values[_LOGPROBS] = _pack_logprobs(completion.logprobs)
    return values


def _unpack_completion(values: list[Any]) -> CompletionOutput:
    values[_LOGPROBS] = _unpack_logprobs(values[_LOGPROBS])
    return CompletionOutput(*values)


def _pack_logprobs(positions: Sequence[PositionLogprobs | None] | None) -> list[Any] | None:
    """Lists, not maps: the order of a position's tokens is part of what it says."""
    if positions is None:
        return None
    return [
        position
        and [
            (token_id, one.logprob, one.rank, one.decoded_token)
            for token_id, one in position.items()
        ]
        for position in positions
    ]


def _unpack_logprobs(positions: list[Any] | None) -> list[Any] | None:
    if positions is None:
        return None
    return [
        position and {token_id: Logprob(*values) for token_id, *values in position}
        for position in positions
    ]


def _pack_error(error: Exception | None) -> list[str] | None:
    return None if error is None else [type(error).__name__, str(error)]


def _unpack_failure(packed: list[str] | None) -> errors.OctavoError | None:
    """Why one request failed; an error of Octavo's, as its sender has seen to."""
    error = None if packed is None else _unpack_error(packed)
    assert error is None or isinstance(error, errors.OctavoError)
    return error


def _unpack_error(packed: list[str]) -> Exception:
    """An error of the same class where this side knows it, else an OctavoError that names it."""
    name, message = packed
    for kind in (getattr(errors, name, None), InvariantError, getattr(builtins, name, None)):
        if isinstance(kind, type) and kind.__name__ == name and issubclass(kind, Exception):
            try:
                return kind(message)
            except TypeError:  # a class that takes more than a message
                break
    return errors.OctavoError(f"{name}: {message}")


def _values(message: Any) -> list[Any]:
    return [getattr(message, field.name) for field in fields(message)]


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, StructuredOutputsParams):
        return asdict(value)
    if isinstance(value, int):
        size = value.bit_length() // 8 + 1
        return msgpack.ExtType(_LARGE_INTEGER, value.to_bytes(size, "big", signed=True))
    raise TypeError(f"{value!r} of type {type(value).__name__} can not be sent")


def _large_integer(code: int, data: bytes) -> int:
    assert code == _LARGE_INTEGER
    return int.from_bytes(data, "big", signed=True)
