"""Messages as users write them, checked and made into what chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.graphs.errors import RequestError

_MAX_DEPTH = 64  # of nested mappings and lists, far beyond any tool's description


def prepare_messages(messages: object) -> list[dict[str, Any]]:
    """A copy of plain data; RequestError names the first message that is malformed.

    Parts of a content are joined by line ends and a content that is missing beside tool calls is
    empty, both as in vLLM; keys without a value are left out, as in transformers.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages is of type {type(messages).__name__}: give a list of "
            '{"role": ..., "content": ...}'
        )
    if not messages:
        raise RequestError("messages is empty: give at least one message")
    return [_message(message, f"message {index}") for index, message in enumerate(messages)]


def as_json(value: object, where: str, depth: int = 0) -> Any:
    """A copy of nothing but JSON types, so a template can call no method of a caller's object."""
    if depth > _MAX_DEPTH:
        raise RequestError(f"{where} is nested deeper than {_MAX_DEPTH} levels: flatten it")
    if value is None or isinstance(value, bool):
        return value
    # Types derived from these, such as enumerations, are reduced to them.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise RequestError(f"{where} holds a mapping with keys that are no texts: name them")
        return {str.__str__(k): as_json(v, where, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item, where, depth + 1) for item in value]
    raise RequestError(
        f"{where} holds a value of type {type(value).__name__}: give texts, numbers, lists and "
        "mappings"
    )


def _message(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(
            f'{where} is of type {type(value).__name__}: give {{"role": ..., "content": ...}}'
        )
    message = {k: v for k, v in as_json(value, where).items() if v is not None}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(
            f'{where} has the role {role!r}: give a text such as "user" or "assistant"'
        )
    if "content" in message:
        message["content"] = _content(message["content"], where)
    elif role == "assistant":
        message["content"] = ""  # of an answer that only calls tools
    else:
        raise RequestError(f'{where} of the role "{role}" has no content: give a text')
    if "tool_calls" in message:
        _read_tool_calls(message, where)
    return message


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"the content of {where} is of type {type(content).__name__}: give a text or a list "
            'of {"type": "text", "text": ...}'
        )
    return "\n".join(_part(part, where) for part in content)


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if not isinstance(part, dict) or kind != "text":
        raise RequestError(
            f"the content of {where} has a part of type {kind!r}: the engine reads text alone, "
            'give {"type": "text", "text": ...}'
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"the content of {where} has a text part with the text {text!r}")
    return text


def _read_tool_calls(message: dict[str, Any], where: str) -> None:
    """Arguments come as JSON text in OpenAI's format; templates read them as mappings."""
    calls = message["tool_calls"]
    if not isinstance(calls, list):
        raise RequestError(f"tool_calls of {where} is of type {type(calls).__name__}: give a list")
    if not calls:
        del message["tool_calls"]  # templates ask only whether it is there
    for call in calls:
        # Templates take OpenAI's {"function": {...}} or the name and arguments alone.
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise RequestError(
                f'{where} has a tool call {call!r:.60}: give {{"function": {{"name": ...}}}}'
            )
        function["arguments"] = _arguments(function.get("arguments"))


def _arguments(arguments: object) -> object:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        # What an earlier answer got wrong is shown as it was: refusing it would end the chat.
        return json.loads(arguments) if arguments else {}
    except ValueError:
        return arguments
