"""Renders a model's chat template: code from a checkpoint, so it runs in a sandbox.

What templates may use follows transformers (`utils/chat_template_utils.py`), how messages are
prepared for them follows vLLM. Whatever goes wrong is a RequestError.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.graphs.errors import RequestError
from octavo.runtime.text.chat_messages import as_json, prepare_messages

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser

_MAX_PROMPT_CHARS = 1 << 24  # more than any context takes: a template that loops is stopped
_MAX_REASON_CHARS = 300
# Written behind a message that is to be continued, to find its end in the rendered text. The space
# at its end shows whether the template keeps or strips a message's white space.
_END_OF_MESSAGE = "OCTAVO_END_OF_FINAL_MESSAGE "


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, object] | None = None,
) -> str:
    """The prompt for a conversation; RequestError if the template refuses it or is broken."""
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "add_generation_prompt and continue_final_message are both set: a prompt either begins "
            "an answer or continues the last message"
        )
    names = {
        **as_json(variables or {}, "template_variables"),
        "messages": prepare_messages(messages),
        "tools": _descriptions(tools, "tools"),
        "documents": _descriptions(documents, "documents"),
        "add_generation_prompt": add_generation_prompt,
    }
    if not continue_final_message:
        return _run(template, names)
    final = names["messages"][-1]
    content, final["content"] = final["content"], final["content"] + _END_OF_MESSAGE
    return _up_to_end_of(content, _run(template, names))


def _descriptions(value: object, name: str) -> list[dict[str, Any]] | None:
    """Tools or documents; an empty list is None, which is all that some templates ask for."""
    if value is None:
        return None
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        raise RequestError(f"{name} is of type {type(value).__name__}: give a list of mappings")
    for entry in value:
        if not isinstance(entry, Mapping):
            raise RequestError(
                f"{name} holds an entry of type {type(entry).__name__}: give mappings"
            )
    return [as_json(entry, name) for entry in value] or None


def _run(template: str, names: Mapping[str, object]) -> str:
    from jinja2 import TemplateError

    parts: list[str] = []
    num_chars = 0
    try:
        for part in _compile(template).generate(names):
            parts.append(part)
            num_chars += len(part)
            if num_chars > _MAX_PROMPT_CHARS:
                raise TemplateError(
                    f"its text is longer than {_MAX_PROMPT_CHARS} characters, shorten the messages"
                )
    except Exception as error:  # a template is code: it may raise anything
        raise RequestError(
            f"the chat template cannot render these messages: {_reason(error)}"
        ) from error
    return "".join(parts)


def _reason(error: Exception) -> str:
    from jinja2 import TemplateError

    message = error.message if isinstance(error, TemplateError) else str(error)
    reason = " ".join((message or "").split())
    if not isinstance(error, TemplateError) or not reason:
        reason = f"{type(error).__name__}: {reason}".removesuffix(": ")
    return reason if len(reason) <= _MAX_REASON_CHARS else reason[:_MAX_REASON_CHARS] + "..."


def _up_to_end_of(content: str, prompt: str) -> str:
    """The prompt cut where its last message ends."""
    end = prompt.rfind(_END_OF_MESSAGE.strip())
    if end < 0 or content.strip() not in prompt:
        raise RequestError(
            "continue_final_message is set, but the chat template does not show the last message "
            "as it is: end the conversation with another message, or begin a new answer"
        )
    keeps_spaces = prompt.startswith(_END_OF_MESSAGE, end)
    return prompt[:end] if keeps_spaces else prompt[:end].rstrip()


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    """Sets up what templates of Hugging Face checkpoints expect to find."""
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.runtime import Context, Undefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}` marks the assistant's text for training; here it has no effect."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> Node | list[Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Sandbox(ImmutableSandboxedEnvironment):
        """Refuses unsafe access at once; jinja2 renders as nothing what is not used further.

        Loops are bounded by the sandbox's range and by the length of the prompt, sizes here.
        """

        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
            if _size(operator, left, right) > _MAX_PROMPT_CHARS:
                raise TemplateError(f"its {operator!r} makes a value that is too large")
            return super().call_binop(context, operator, left, right)

        def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
            raise SecurityError(
                f"it reads the attribute {attribute!r} of a {type(obj).__name__}, which the "
                "sandbox does not allow"
            )

    class SafeNamespace(Namespace):
        """Namespaces whose attributes cannot pose as those of Python objects."""

        def __init__(*args: Any, **attributes: Any) -> None:
            self, *values = args
            for name in dict(*values, **attributes):
                _check_attribute(name)
            Namespace.__init__(self, *values, **attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_attribute(name)
            super().__setitem__(name, value)

    def _check_attribute(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"it sets the attribute {name!r}, which the sandbox does not allow")

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["namespace"] = SafeNamespace
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _size(operator: str, left: object, right: object) -> int:
    """About the characters of a repeated text or list, the bits of a power of integers."""
    if operator == "**":
        if isinstance(left, int) and isinstance(right, int):
            return left.bit_length() * right
        return 0
    for repeated, times in ((left, right), (right, left)):
        if isinstance(repeated, str | list | tuple) and isinstance(times, int):
            return len(repeated) * times
    return 0


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and & for HTML, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(pattern: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(pattern)
