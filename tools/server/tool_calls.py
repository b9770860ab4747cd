"""Tool calls: how a model writes them, and how its text becomes content and calls.

What is read from a text is its deltas, in OpenAI's form: a stream sends them as they come, an
answer that comes at once is their sum.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.graphs.errors import RequestError
from octavo.tools.server.options import ToolCallFormatName
from octavo.tools.server.responses import ChatDelta, FinishReason, FunctionCall

Call = tuple[str, str]  # a function's name and its arguments as JSON

_PYTHON_TAG = "<|python_tag|>"
# What a chat template says of the format.
_MARKS: dict[str, ToolCallFormatName] = {
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    '"parameters"': "llama3_json",
}


@dataclass(frozen=True)
class ToolCallFormat:
    """How calls stand in a text.

    read           the calls in a text between the markers; ValueError if it is none
    begin          starts a call, or all of them; None: the text as a whole is calls or content
    end            ends a call; None: the end of the text does
    openings       how a text begins that is calls as a whole
    special_token  whether `begin` is a token that a text without special tokens lacks
    """

    name: ToolCallFormatName
    read: Callable[[str], list[Call]]
    begin: str | None = None
    end: str | None = None
    openings: tuple[str, ...] = ()
    special_token: bool = False


def tool_call_format(template: str | None, name: ToolCallFormatName) -> ToolCallFormat | None:
    """How a model with this chat template writes calls; None if the template does not show it.

    RequestError if the template knows no tools.
    """
    if template is None or "tools" not in template:
        raise RequestError(
            "tools are given and the engine's chat template knows none: describe them in a message"
        )
    if name != "auto":
        return _FORMATS[name]
    return next((_FORMATS[shown] for mark, shown in _MARKS.items() if mark in template), None)


class TextReader(Protocol):
    """Turns the text of one choice into deltas."""

    def push(self, text: str) -> Sequence[ChatDelta]:
        """What the next piece of text settles."""

    def finish(self) -> Sequence[ChatDelta]:
        """What is left at the text's end."""

    def finish_reason(self, reason: FinishReason | None) -> FinishReason | None:
        """The engine's reason, as this text's clients are to see it."""


class PlainReader:
    """All is content."""

    def push(self, text: str) -> Sequence[ChatDelta]:
        return [{"content": text}] if text else []

    def finish(self) -> Sequence[ChatDelta]:
        return []

    def finish_reason(self, reason: FinishReason | None) -> FinishReason | None:
        return reason


class _CallReader:
    """Counts calls; of the names alone that `tools` has, and no more than `most`."""

    def __init__(self, names: Collection[str], most: int | None) -> None:
        self._names = names
        self._most = most
        self._num_calls = 0

    def finish_reason(self, reason: FinishReason | None) -> FinishReason | None:
        return "tool_calls" if reason == "stop" and self._num_calls else reason

    def _deltas(self, calls: Sequence[Call]) -> list[ChatDelta]:
        """ValueError if a call is to a tool that was not given."""
        if any(name not in self._names for name, _ in calls):
            raise ValueError
        left = len(calls) if self._most is None else self._most - self._num_calls
        deltas = []
        for name, arguments in calls[: max(0, left)]:
            deltas.append(_call_delta(self._num_calls, name, arguments))
            self._num_calls += 1
        return deltas


class MarkedCallReader(_CallReader):
    """Finds the calls that a model writes of its own accord; what is no call stays content."""

    def __init__(
        self, written: ToolCallFormat, names: Collection[str], most: int | None = None
    ) -> None:
        super().__init__(names, most)
        self._format = written
        self._text = ""  # not settled yet
        self._inside = written.begin is None
        self._is_content = False  # all of it

    def push(self, text: str) -> Sequence[ChatDelta]:
        self._text += text
        if self._format.begin is None and not self._may_be_calls():
            self._is_content = True
        if self._is_content:
            return self._take_content()
        deltas: list[ChatDelta] = []
        while True:
            found = self._call() if self._inside else self._content()
            if found is None:
                return deltas
            deltas += found

    def finish(self) -> Sequence[ChatDelta]:
        if self._is_content or not self._inside:
            return self._take_content() if self._text.strip() or not self._num_calls else []
        return self._read(self._text, (self._format.begin or "") + self._text)

    def _may_be_calls(self) -> bool:
        begun = self._text.lstrip()
        return any(
            begun[: len(opening)] == opening[: len(begun)] for opening in self._format.openings
        )

    def _take_content(self) -> list[ChatDelta]:
        text, self._text = self._text, ""
        return _content(text)

    def _content(self) -> list[ChatDelta] | None:
        """Up to the next call; of the rest, all that cannot be the beginning of one."""
        begin = self._format.begin
        assert begin is not None
        before, mark, after = self._text.partition(begin)
        if mark:
            self._inside, self._text = True, after
            return _content(before.rstrip())
        kept = next(n for n in range(len(begin) - 1, -1, -1) if before.endswith(begin[:n]))
        settled = before[: len(before) - kept].rstrip()
        if not settled:  # white space is content only where content follows it
            return None
        self._text = before[len(settled) :]
        return _content(settled)

    def _call(self) -> list[ChatDelta] | None:
        """One whole call; None while it lasts. A format without an end lasts to the text's end."""
        if self._format.end is None:
            return None
        text, mark, after = self._text.partition(self._format.end)
        if not mark:
            return None
        self._inside, self._text = False, after
        return self._read(text, f"{self._format.begin}{text}{mark}")

    def _read(self, text: str, as_content: str) -> list[ChatDelta]:
        try:
            return self._deltas(self._format.read(text))
        except (ValueError, RecursionError):
            return _content(as_content)


class RequiredCallReader(_CallReader):
    """Reads an array of calls, which is all that the grammar of `required_calls` lets through."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names, None)
        self._text = ""

    def push(self, text: str) -> Sequence[ChatDelta]:
        self._text += text
        return []

    def finish(self) -> Sequence[ChatDelta]:
        try:
            return self._deltas(_read_array(self._text))
        except (ValueError, RecursionError):  # the answer was cut off
            return _content(self._text)


class NamedCallReader:
    """The text is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def push(self, text: str) -> Sequence[ChatDelta]:
        if not text:
            return []
        if self._begun:
            return [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]}]
        self._begun = True
        return [_call_delta(0, self._name, text)]

    def finish(self) -> Sequence[ChatDelta]:
        return []

    def finish_reason(self, reason: FinishReason | None) -> FinishReason | None:
        return reason


def required_calls(tools: Sequence[tuple[str, dict[str, Any]]], most: int | None) -> dict[str, Any]:
    """The JSON schema of one or more calls of `tools`, which are names and schemas."""
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"name": {"const": name}, "parameters": parameters},
                    "required": ["name", "parameters"],
                    "additionalProperties": False,
                }
                for name, parameters in tools
            ]
        },
    }
    return schema if most is None else schema | {"maxItems": most}


def _call_delta(index: int, name: str, arguments: str) -> ChatDelta:
    function: FunctionCall = {"name": name, "arguments": arguments}
    call_id = f"call_{uuid.uuid4().hex[:24]}"
    return {
        "tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]
    }


def _content(text: str) -> list[ChatDelta]:
    return [{"content": text}] if text else []


def _read_object(text: str) -> list[Call]:
    return [_call_of(json.loads(text))]


def _read_array(text: str) -> list[Call]:
    calls = json.loads(text)
    if not isinstance(calls, list) or not calls:
        raise ValueError
    return [_call_of(call) for call in calls]


def _read_objects(text: str) -> list[Call]:
    """Objects one after another, with semicolons or line ends between them."""
    decoder = json.JSONDecoder()
    calls = []
    rest = text.strip().removeprefix(_PYTHON_TAG).strip()
    while rest:
        call, end = decoder.raw_decode(rest)
        calls.append(_call_of(call))
        rest = rest[end:].lstrip("; \n")
    if not calls:
        raise ValueError
    return calls


def _call_of(value: object) -> Call:
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        raise ValueError
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError
    return name, json.dumps(arguments, ensure_ascii=False)


_FORMATS = {
    written.name: written
    for written in (
        ToolCallFormat("hermes", _read_object, begin="<tool_call>", end="</tool_call>"),
        ToolCallFormat("mistral", _read_array, begin="[TOOL_CALLS]", special_token=True),
        ToolCallFormat("llama3_json", _read_objects, openings=("{", _PYTHON_TAG)),
    )
}
