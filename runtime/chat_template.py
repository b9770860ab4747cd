"""Renders a model's chat template: code from a checkpoint, so it runs in a sandbox."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.graphs.errors import RequestError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser


def render(template: str, messages: Sequence[Mapping[str, Any]], **variables: object) -> str:
    """The prompt for a conversation; RequestError if the template refuses it or is broken."""
    from jinja2 import TemplateError

    try:
        return _compile(template).render(messages=list(messages), **variables)
    except TemplateError as error:
        raise RequestError(f"the chat template cannot render these messages: {error}") from error


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    """Sets up what templates of Hugging Face checkpoints expect to find."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's text for training; here it has no effect."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> Node | list[Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _to_json(value: object, indent: int | None = None, ensure_ascii: bool = False) -> str:
    # jinja2's own filter escapes <, > and & for HTML, which no model was trained on.
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _strftime_now(pattern: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(pattern)
