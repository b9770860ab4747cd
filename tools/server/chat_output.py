"""What the answer of a chat may be: a text, JSON of a schema, or calls of tools."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from octavo.tools.server.errors import ApiError
from octavo.tools.server.requests import ChatRequest, NamedToolChoice, ResponseFormat, Tool
from octavo.tools.server.service import Service
from octavo.tools.server.tool_calls import (
    MarkedCallReader,
    NamedCallReader,
    PlainReader,
    RequiredCallReader,
    TextReader,
    required_calls,
)

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class OutputRules:
    """How one request's answer is made and read.

    reader            a new reader for each choice
    tools             what the chat template is to describe
    sampling_options  what `SamplingParams` take beside the request's own fields
    """

    reader: Callable[[], TextReader]
    tools: list[dict[str, Any]] | None = None
    sampling_options: dict[str, Any] = field(default_factory=dict)


def output_rules(service: Service, request: ChatRequest) -> OutputRules:
    """ApiError or RequestError for a combination that cannot be."""
    structured = _structured_outputs(request)
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none"):
            raise ApiError(
                400, "tool_choice is given without tools: give tools", param="tool_choice"
            )
        return OutputRules(PlainReader, sampling_options=structured)
    if choice == "none":
        return OutputRules(PlainReader, sampling_options=structured)
    if structured:
        raise ApiError(
            400,
            "response_format or structured_outputs is given with tools, whose calls it would "
            'forbid: leave it out or set tool_choice to "none"',
            param="tools",
        )
    return _tool_rules(service, request, request.tools)


def _tool_rules(service: Service, request: ChatRequest, tools: list[Tool]) -> OutputRules:
    written = service.tool_calls  # refuses tools that the model would never see
    choice = request.tool_choice
    described = [tool.model_dump(exclude_none=True) for tool in tools]
    schemas = {tool.function.name: tool.function.parameters or _ANY_OBJECT for tool in tools}
    most = 1 if request.parallel_tool_calls is False else None
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in schemas:
            raise ApiError(
                400,
                f"tool_choice names {name!r}, which is none of the tools: {', '.join(schemas)}",
                param="tool_choice",
            )
        reader = functools.partial(NamedCallReader, name)
        return OutputRules(reader, described, {"structured_outputs": {"json": schemas[name]}})
    if choice == "required":
        schema = required_calls(list(schemas.items()), most)
        reader_of_all = functools.partial(RequiredCallReader, schemas)
        return OutputRules(reader_of_all, described, {"structured_outputs": {"json": schema}})
    if written is None:
        raise ApiError(
            400,
            "the engine's chat template does not show how the model writes tool calls: start the "
            'server with --tool-call-format, or set tool_choice to "required"',
            param="tools",
        )
    options = {"skip_special_tokens": False} if written.special_token else {}
    return OutputRules(
        functools.partial(MarkedCallReader, written, schemas, most), described, options
    )


def _structured_outputs(request: ChatRequest) -> dict[str, Any]:
    """As an option of the sampling, none if the answer is free."""
    wanted = _of_response_format(request.response_format)
    if wanted is None:
        wanted = request.structured_outputs
    elif request.structured_outputs is not None:
        raise ApiError(
            400,
            "response_format and structured_outputs are both given: give one of them",
            param="structured_outputs",
        )
    return {} if wanted is None else {"structured_outputs": wanted}


def _of_response_format(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.json_schema is None:
        raise ApiError(
            400,
            'response_format is of the type "json_schema" and has no json_schema: give one',
            param="response_format",
        )
    schema = wanted.json_schema.schema_
    return {"json_object": True} if schema in (None, True) else {"json": schema}
