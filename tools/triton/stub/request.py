"""A request of Triton as the engine process reads it, or the sentence that refuses it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from . import tensors
from .tensors import Parameter, Tensor

_SCALARS: dict[str, Callable[[Any], Any]] = {
    tensors.BOOL: bool,
    tensors.INT32: int,
    tensors.UINT64: int,
    # Of a float32 its shortest text: 0.7 is sent as 0.699999988, and meant as 0.7.
    tensors.FP32: lambda value: float(str(value)),
}


class BadRequestError(ValueError):
    """What is wrong with a request, in one sentence."""


def read_request(request: Any) -> dict[str, Any]:
    """Prompt, parameters and flags, as plain values; BadRequestError if an input is malformed.

    request  a `pb_utils.InferenceRequest`
    """
    values = {}
    for tensor in request.inputs():
        declared = tensors.INPUTS.get(tensor.name())
        if declared is None:
            raise BadRequestError(f"{tensor.name()!r} is no input of this model")
        values[declared.name] = _read(declared, tensor.as_numpy())
    text, ids = values.get(tensors.TEXT_INPUT.name), values.get(tensors.INPUT_IDS.name)
    if (text is None) == (ids is None):
        given = "both are" if ids is not None else "neither is"
        raise BadRequestError(f"a request needs text_input or input_ids, {given} given: give one")
    return {
        "text": text,
        "token_ids": ids,
        "parameters": _parameters(request, values),
        "stream": values.get(tensors.STREAM.name, False),
        "exclude_input": values.get(tensors.EXCLUDE_INPUT.name),
        "returns": [out.name for flag, out in tensors.RETURNS.items() if values.get(flag.name)],
        "priority": values.get(tensors.PRIORITY.name, 0),
        "cache_salt": values.get(tensors.CACHE_SALT.name, ""),
    }


def _read(declared: Tensor, array: Any) -> Any:
    """A Python value, or a list where the tensor may have any number of elements."""
    flat = array.reshape(-1)
    if declared.data_type == tensors.STRING:
        elements = [_text(declared.name, value) for value in flat]
    else:
        elements = [_SCALARS[declared.data_type](value) for value in flat]
    if declared.size == tensors.ANY:
        return elements
    if len(elements) != declared.size:
        raise BadRequestError(f"{declared.name} has {len(elements)} elements, it must have one")
    return elements[0]


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequestError(f"{name} is not UTF-8 text ({error.reason})") from None


def _parameters(request: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters from the three places where they may be; each may be given once."""
    merged: dict[str, Any] = {}
    for declared in tensors.INPUTS.values():
        if isinstance(declared, Parameter) and declared.name in values:
            value = values[declared.name]
            if declared.size == tensors.ANY:
                value = _texts(value)
            _add(merged, declared.parameter_name, value)
    for origin, text in (
        (tensors.SAMPLING_PARAMETERS.name, values.get(tensors.SAMPLING_PARAMETERS.name)),
        ("the parameters of the request", request.parameters()),
    ):
        for name, value in _json_object(origin, text).items():
            _add(merged, name, value)
    return merged


def _add(merged: dict[str, Any], name: str, value: Any) -> None:
    if name in merged:
        raise BadRequestError(f"{name} is given twice: give it once")
    merged[name] = value


def _texts(values: list[str]) -> list[str]:
    """/generate of some clients can send a list only as a JSON text."""
    if len(values) == 1 and values[0].startswith("["):
        try:
            texts = json.loads(values[0])
        except (ValueError, RecursionError):
            return values
        if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
            return texts
    return values


def _json_object(origin: str, text: str | None) -> dict[str, Any]:
    if not text:
        return {}
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"{origin} is no JSON ({error})") from None
    if not isinstance(content, dict):
        raise BadRequestError(f"{origin} is {text[:60]!r}, it must be a JSON object")
    return content
