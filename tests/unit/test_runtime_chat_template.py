"""Chat templates: what they are given, what they may do, and how they fail."""

from __future__ import annotations

import enum
from datetime import datetime
from typing import Any

import pytest

from octavo.graphs.errors import RequestError
from octavo.runtime.text.tokenizer import Tokenizer
from tests.unit.tokenizer_kinds import BYTE_BOS, BYTE_EOS, byte_level

TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
[{{ message.role }}] {% generation %}{{ message.content | trim }}{% endgeneration %}{{ '\n' }}
{%- endfor %}

{%- if add_generation_prompt %}[assistant]{% endif %}"""
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]


def chat(template: str | None, messages: Any, **options: Any) -> str:
    tokenizer = Tokenizer(
        byte_level(), bos_token_id=BYTE_BOS, eos_token_id=BYTE_EOS, chat_template=template
    )
    return tokenizer.apply_chat_template(messages, **options)


def test_a_chat_template_renders_as_hugging_face_does() -> None:
    messages = [{"role": "user", "content": " Hi & <you> "}]
    assert chat(TEMPLATE, messages) == "<s>[user] Hi & <you>\n[assistant]"
    assert chat(TEMPLATE, messages, add_generation_prompt=False) == "<s>[user] Hi & <you>\n"
    assert chat(TEMPLATE, HI * 4, add_generation_prompt=False) == "<s>" + "[user] Hi\n" * 3
    assert chat("{{ messages | tojson }}{{ eos_token }}", messages) == (
        '[{"role": "user", "content": " Hi & <you> "}]</s>'
    )


def test_templates_see_tools_documents_their_own_variables_and_the_date() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert chat("{{ tools[0].function.name }}", HI, tools=tools) == "f"
    assert chat("{{ documents[0].title }}", HI, documents=[{"title": "t", "text": ""}]) == "t"
    # Templates ask for both with `is not none`.
    absent = "{{ tools is none and documents is none }}"
    assert chat(absent, HI) == chat(absent, HI, tools=[], documents=[]) == "True"
    thinking = "{{ enable_thinking is defined and enable_thinking }}"
    assert chat(thinking, HI) == "False"
    assert chat(thinking, HI, enable_thinking=True) == "True"
    assert chat("{{ bos_token }}", HI, bos_token="[BOS]") == "[BOS]"
    assert chat("{{ strftime_now('%Y') }}", HI) in {str(datetime.now().year + i) for i in (-1, 0)}


def test_tojson_takes_the_options_of_transformers() -> None:
    value = [{"role": "user", "content": "é", "name": "n"}]
    assert chat("{{ messages[0] | tojson(ensure_ascii=True) }}", value) == (
        '{"role": "user", "content": "\\u00e9", "name": "n"}'
    )
    assert chat("{{ messages[0] | tojson(separators=(',', ':'), sort_keys=true) }}", value) == (
        '{"content":"é","name":"n","role":"user"}'
    )
    assert chat("{{ {'a': 1} | tojson(indent=2) }}", value) == '{\n  "a": 1\n}'


def test_a_content_of_parts_is_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(PLAIN, [{"role": "user", "content": parts}]) == "<user>a\nb</>"
    assert chat(PLAIN, ({"role": "user", "content": []},)) == "<user></>"


def test_an_answer_may_call_tools_instead_of_saying_something() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    template = (
        "{% for m in messages %}{{ m.content is none }}{% for c in m.tool_calls or [] %}"
        "{{ (c.function or c).arguments | tojson }}{% endfor %}{% endfor %}"
    )
    for arguments, rendered in (
        ('{"x": [1]}', '{"x": [1]}'),
        ({"x": [1]}, '{"x": [1]}'),
        ("", "{}"),
        (None, "{}"),
        ("{broken", '"{broken"'),
    ):
        call = {"function": {"name": "f", "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        assert chat(template, [message]) == "False" + rendered
    bare: dict[str, Any] = {
        "role": "assistant",
        "tool_calls": [{"name": "f", "arguments": {"x": 1}}],
    }
    assert chat(template, [bare]) == 'False{"x": 1}'
    bare = {"role": "assistant", "content": "a", "tool_calls": [], "name": None}
    assert chat("{{ messages[0] | tojson }}", [bare]) == '{"role": "assistant", "content": "a"}'
    assert bare["tool_calls"] == []  # the caller's messages are left as they were


class Role(str, enum.Enum):  # noqa: UP042 - str() of it is not its value
    USER = "user"


def test_templates_get_plain_data_alone() -> None:
    assert chat("{{ messages[0] | tojson }}", [{"role": Role.USER, "content": "a"}]) == (
        '{"role": "user", "content": "a"}'
    )
    deep: list[Any] = []
    for _ in range(70):
        deep = [deep]
    for extra, reason in (
        (object(), "message 0 holds a value of type object: give texts"),
        (deep, "message 0 is nested deeper than 64 levels"),
        ({3: 4}, "message 0 holds a mapping with keys that are no texts"),
    ):
        with pytest.raises(RequestError, match=reason):
            chat(PLAIN, [{"role": "user", "content": "a", "extra": extra}])
    with pytest.raises(RequestError, match="template_variables holds a value of type method"):
        chat(PLAIN, HI, callback=chat.__get__(object()))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("Hi", 'messages is of type str: give a list of {"role": ..., "content": ...}'),
        ({"role": "user", "content": "Hi"}, "messages is of type dict"),
        ([], "messages is empty: give at least one message"),
        (["Hi"], "message 0 is of type str"),
        ([*HI, {"content": "Hi"}], "message 1 has the role None"),
        ([{"role": 3, "content": "Hi"}], "message 0 has the role 3"),
        ([{"role": "user"}], 'message 0 of the role "user" has no content'),
        ([{"role": "user", "content": 3}], "the content of message 0 is of type int"),
        ([{"role": "user", "content": [3]}], "has a part of type 'int'"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "the content of message 0 has a part of type 'image_url': the engine reads text alone",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "a text part with the text None"),
        ([{"role": "assistant", "tool_calls": "f"}], "tool_calls of message 0 is of type str"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "message 0 has a tool call 'f'"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, reason: str) -> None:
    with pytest.raises(RequestError) as refusal:
        chat(PLAIN, messages)
    assert reason in str(refusal.value)


def test_tools_must_be_mappings() -> None:
    for tools, reason in (({"name": "f"}, "tools is of type dict"), ([1], "an entry of type int")):
        with pytest.raises(RequestError, match=reason):
            chat(PLAIN, HI, tools=tools)


def test_the_last_message_may_be_continued() -> None:
    started = [*HI, {"role": "assistant", "content": "Sure, "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert chat(PLAIN, started, **options) == "<user>Hi</><assistant>Sure, "
    # This template strips white space, so the prompt ends where the message's text does.
    assert chat(TEMPLATE, started, **options) == "<s>[user] Hi\n[assistant] Sure,"
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "Hi"}]}]
    assert chat(PLAIN, [*HI, *parts], **options) == "<user>Hi</><assistant>Hi"
    assert chat("{{ messages[0].content }}</>", HI, **options) == "Hi"


def test_what_cannot_be_continued_is_refused() -> None:
    with pytest.raises(RequestError, match="add_generation_prompt and continue_final_message"):
        chat(PLAIN, HI, continue_final_message=True)
    options = {"add_generation_prompt": False, "continue_final_message": True}
    for template in ("{{ messages[0].role }}", "{{ messages[0].content[:4] }}"):
        with pytest.raises(RequestError, match="does not show the last message as it is"):
            chat(template, [{"role": "user", "content": "Hello"}], **options)


def test_a_chat_template_may_refuse() -> None:
    with pytest.raises(RequestError, match="cannot render these messages: no tools here"):
        chat(TEMPLATE, [{"role": "tool", "content": ""}])
    with pytest.raises(RequestError, match="has no chat template"):
        chat(None, [])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0]['__class__'] or messages.__class__ }}",
        "{{ ('' | attr('__class__')) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__html__=1) }}",
        "{{ namespace({'__html__': 1}) }}",
    ],
)
def test_a_chat_template_cannot_leave_its_sandbox(template: str) -> None:
    with pytest.raises(RequestError, match="cannot render"):
        chat(template, HI)


def test_templates_may_calculate() -> None:
    template = "{{ 'ab' * 2 }}{{ 2 * 3 }}{{ 2 ** 10 }}{{ 2 ** -1 }}{{ 4 ** 0.5 }}{{ 'a' * -1 }}"
    assert chat(template, HI) == "abab610240.52.0"


def test_namespaces_keep_values_over_loops() -> None:
    template = (
        "{% set ns = namespace({'a': 1}, n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}"
        "{% endfor %}{{ ns.n }}{{ ns.a }}"
    )
    assert chat(template, HI) == "31"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].content + 1 }}", "TypeError: can only concatenate str"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ strftime_now(1) }}", "TypeError"),
        ("{{ messages | tojson(indent='\\n', separators=3) }}", "TypeError"),
        ("{{ missing.field }}", "'missing' is undefined"),
        ("{{ range(1000000) | list }}", "OverflowError: Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        (
            "{% for i in range(90000) %}{% for j in range(90000) %}{{ 'x' * 999 }}{% endfor %}"
            "{% endfor %}",
            "its text is longer than 16777216 characters",
        ),
        ("{{ 'x' * 3 * 10**9 }}", "its '*' makes a value that is too large"),
        ("{{ 3 * messages * 10**9 }}", "its '*' makes a value that is too large"),
        ("{{ 9 ** (9 ** 9) }}", "its '**' makes a value that is too large"),
        ("{{ raise_exception('a\n  b' * 400) }}", "a ba ba"),
    ],
)
def test_whatever_goes_wrong_is_one_sentence(template: str, reason: str) -> None:
    with pytest.raises(RequestError) as refusal:
        chat(template, HI)
    message = str(refusal.value)
    assert message.startswith("the chat template cannot render these messages: ")
    assert reason in message
    assert "\n" not in message
    assert len(message) < 400
