"""Chat templates in the manner of well-known models render as transformers renders them."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from octavo.graphs.errors import RequestError
from octavo.runtime.text import chat_template

# In the manner of Llama 3.1: a date, tools in the first message, headers, trimmed contents.
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}<|eot_id|>
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{ raise_exception("one call") }}{% endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
# In the manner of Qwen 3: namespaces over a reversed list, string methods, a template variable.
QWEN = """{%- set ns = namespace(multi_step_tool=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- set answers = message.content.startswith('<tool_response>') %}
    {%- if ns.multi_step_tool and message.role == "user" and not answers %}
        {%- set ns.multi_step_tool = false %}{% set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}{{ "\\n" }}{{ tool | tojson }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{% continue %}{% endif %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- for tool_call in message.tool_calls or [] %}
        {%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
        {{- '\\n<tool_call>' + tool_call.name }}{{ tool_call.arguments | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>' }}
    {%- endif %}
{%- endif %}"""
# In the manner of Gemma: alternating roles, a renamed role.
GEMMA = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}
{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""
# In the manner of SmolLM 3: marks of generated text, documents.
MARKED = """{% for d in documents or [] %}{{ d.title }}: {{ d['text'] | upper }}
{% endfor %}
{% for m in messages %}
{% if m.role == 'assistant' %}
{% generation %}{{ m.content }}{{ eos_token }}
{% endgeneration %}
{% else %}
{{ m.content }}
{% endif %}
{% endfor %}"""

USER: dict[str, Any] = {"role": "user", "content": " What is 2 < 3 & \u4e2d\u6587? "}
ANSWER = {"role": "assistant", "content": "<think>well</think>\n\nSure. "}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": "\u00e9"}}}],
}
RESULT = {"role": "tool", "content": '{"y": 1}', "name": "f"}
SYSTEM = {"role": "system", "content": "Be brief. "}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [SYSTEM, USER, ANSWER, USER],
    "answer": [USER, ANSWER],
    "tools": [SYSTEM, USER, CALL, RESULT],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prompt": {"add_generation_prompt": True},
    "continued": {"continue_final_message": True},
    "tools": {"tools": TOOLS, "date_string": "1 Jan 2026"},
    "documents": {"documents": [{"title": "t", "text": "body"}], "enable_thinking": False},
    "variables": {"enable_thinking": False, "add_generation_prompt": True},
}


# As given to transformers, which has other defaults.
DEFAULTS: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": False}
SPECIAL: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
NAMED = {"add_generation_prompt", "continue_final_message", "tools", "documents"}
TEMPLATES = {"llama": LLAMA, "qwen": QWEN, "gemma": GEMMA, "marked": MARKED}
# The first template encodes the results of tools, the second leaves out what was thought.
NOT_CONTINUED = {("llama", "tools", "continued"), ("qwen", "answer", "continued")}


def render(template: str, messages: list[dict[str, Any]], given: dict[str, Any]) -> str:
    variables = {name: value for name, value in given.items() if name not in NAMED}
    options = {name: value for name, value in given.items() if name in NAMED}
    return chat_template.render(template, messages, variables=variables, **options)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("options", OPTIONS)
def test_it_renders_as_in_transformers(template: str, conversation: str, options: str) -> None:
    messages, source = CONVERSATIONS[conversation], TEMPLATES[template]
    given = DEFAULTS | SPECIAL | OPTIONS[options]
    reference: Any = render_jinja_template  # it is annotated with another result
    try:
        (expected,), _ = reference([messages], chat_template=source, **given)
    except ValueError:
        assert (template, conversation, options) in NOT_CONTINUED
        with pytest.raises(RequestError, match="does not show the last message"):
            render(source, messages, given)
    else:
        assert render(source, messages, given) == expected
