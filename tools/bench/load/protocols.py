"""What is sent to a server, and how many tokens an event of its answer brings.

Load comes from the same machine as often as not: what an event says is looked for in its bytes, and
only what looks like an error is read as JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any, Protocol

from octavo.tools.bench.load.plan import LoadPlan

_TOKENS_UP_TO_NOW = re.compile(rb'"completion_tokens": ?(\d+)')
_TOKENS_OF_RESPONSE = re.compile(rb'"num_output_tokens": ?(\d+)')


class StreamError(Exception):
    """An event that tells of an error, or that cannot be read."""


class ServerProtocol(Protocol):
    """One kind of server."""

    def path(self) -> str:
        """Where requests are posted."""

    def body(self, prompt: str) -> bytes:
        """A request for `output_len` tokens in a stream."""

    def count(self, event: bytes, num_before: int) -> int:
        """Tokens that the client has after an event. StreamError if the event is an error."""

    def is_last(self, event: bytes) -> bool:
        """Whether the server says that nothing follows."""


class OpenAIProtocol:
    def __init__(self, plan: LoadPlan, model: str) -> None:
        self._plan = plan
        self._model = model

    def path(self) -> str:
        return "/v1/chat/completions" if self._plan.chat else "/v1/completions"

    def body(self, prompt: str) -> bytes:
        plan = self._plan
        request: dict[str, Any] = {
            "model": self._model,
            "stream": True,
            "temperature": 0,
            "max_tokens": plan.output_len,
            "ignore_eos": True,
        }
        if plan.chat:
            request["messages"] = [{"role": "user", "content": prompt}]
        else:
            request["prompt"] = prompt
        if not plan.count_chunks:
            request["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        return json.dumps(request).encode()

    def count(self, event: bytes, num_before: int) -> int:
        if event == b"[DONE]":
            return num_before
        if self._plan.count_chunks:
            return num_before + _tokens(event, None)
        return _tokens(event, _TOKENS_UP_TO_NOW)

    def is_last(self, event: bytes) -> bool:
        return event == b"[DONE]"


class TritonProtocol:
    """Triton's `generate_stream`, with the tensors of `octavo export-triton`."""

    def __init__(self, plan: LoadPlan, model: str) -> None:
        self._plan = plan
        self._model = model

    def path(self) -> str:
        return f"/v2/models/{self._model}/generate_stream"

    def body(self, prompt: str) -> bytes:
        parameters = {
            "temperature": 0,
            "max_tokens": self._plan.output_len,
            "ignore_eos": True,
        }
        request = {
            "text_input": prompt,
            "stream": True,
            "sampling_parameters": json.dumps(parameters),
            "return_num_output_tokens": not self._plan.count_chunks,
        }
        return json.dumps(request).encode()

    def count(self, event: bytes, num_before: int) -> int:
        counted = None if self._plan.count_chunks else _TOKENS_OF_RESPONSE
        return num_before + _tokens(event, counted)

    def is_last(self, event: bytes) -> bool:
        return False  # the connection's end says it


def make_protocol(plan: LoadPlan, model: str) -> ServerProtocol:
    return (OpenAIProtocol if plan.protocol == "openai" else TritonProtocol)(plan, model)


def _tokens(event: bytes, counted: re.Pattern[bytes] | None) -> int:
    """What an event says of its tokens; None: it is one. StreamError for an error."""
    if event.startswith(b'{"error"') or not event.endswith(b"}"):
        raise StreamError(_message(event))
    if counted is None:
        return 1
    found = counted.search(event)
    if found is None:
        raise StreamError("the server does not count its tokens: use --count-chunks")
    return int(found[1])


def _message(event: bytes) -> str:
    try:
        error = json.loads(event)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return f"an event is no JSON object: {event[:60]!r}"
