"""Tool calls in a model's text: found in every format, however the text is cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.graphs.errors import RequestError
from octavo.tools.server.options import ToolCallFormatName
from octavo.tools.server.responses import ChatDelta
from octavo.tools.server.tool_calls import (
    MarkedCallReader,
    NamedCallReader,
    PlainReader,
    RequiredCallReader,
    TextReader,
    ToolCallFormat,
    required_calls,
    tool_call_format,
)

NAMES = ("add", "weather")
# A call each as a model writes it, and what it says.
ADD = ("add", {"a": 1, "b": [2]})
WEATHER = ("weather", {"city": "Zürich \U0001f3d4"})
Found = tuple[str, list[tuple[str, Any]]]  # content, and the calls


def of(name: ToolCallFormatName) -> ToolCallFormat:
    found = tool_call_format("{{ tools }}", name)
    assert found is not None
    return found


def marked(name: ToolCallFormatName, most: int | None = None) -> Callable[[], TextReader]:
    return lambda: MarkedCallReader(of(name), NAMES, most)


def read(make: Callable[[], TextReader], pieces: Sequence[str]) -> Found:
    reader = make()
    deltas: list[ChatDelta] = []
    for piece in pieces:
        deltas += reader.push(piece)
    deltas += reader.finish()
    content = "".join(delta.get("content", "") for delta in deltas)
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(names)
                assert (call["type"], call["id"][:5]) == ("function", "call_")
                names[call["index"]] = call["function"]["name"]
            index = call["index"]
            arguments[index] = arguments.get(index, "") + call["function"]["arguments"]
    return content, [(names[index], json.loads(arguments[index])) for index in names]


def written(call: tuple[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


TEXTS: list[tuple[ToolCallFormatName, str, Found]] = [
    ("hermes", "No call at all.", ("No call at all.", [])),
    ("hermes", "", ("", [])),
    ("hermes", " \n", (" \n", [])),
    ("hermes", "a <tool b", ("a <tool b", [])),
    ("hermes", f"<tool_call>\n{written(ADD)}\n</tool_call>", ("", [ADD])),
    (
        "hermes",
        f"Both:\n<tool_call>{written(ADD)}</tool_call>\n<tool_call>\n{written(WEATHER)}</tool_call>",
        ("Both:", [ADD, WEATHER]),
    ),
    (
        "hermes",
        f"<tool_call>{written(ADD)}</tool_call> and then",
        (" and then", [ADD]),
    ),
    ("hermes", "<tool_call>{broken</tool_call>", ("<tool_call>{broken</tool_call>", [])),
    ("hermes", f"<tool_call>{written(ADD)}", ("", [ADD])),  # the end is missing
    ("hermes", '<tool_call>{"name": "add"', ('<tool_call>{"name": "add"', [])),
    (
        "hermes",
        '<tool_call>{"name": "drop_tables", "arguments": {}}</tool_call>',
        ('<tool_call>{"name": "drop_tables", "arguments": {}}</tool_call>', []),
    ),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', ("", [("add", {})])),
    ("hermes", "<tool_call>[1]</tool_call>", ("<tool_call>[1]</tool_call>", [])),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', []),
    ),
    ("mistral", f"[TOOL_CALLS][{written(ADD)}, {written(WEATHER)}]", ("", [ADD, WEATHER])),
    ("mistral", f"So: [TOOL_CALLS] [{written(ADD)}]", ("So:", [ADD])),
    ("mistral", "[TOOL_CALLS][]", ("[TOOL_CALLS][]", [])),
    ("mistral", "An [array] alone", ("An [array] alone", [])),
    ("llama3_json", written(ADD, "parameters"), ("", [ADD])),
    ("llama3_json", f"<|python_tag|>{written(WEATHER, 'parameters')}", ("", [WEATHER])),
    (
        "llama3_json",
        f"{written(ADD, 'parameters')}; {written(WEATHER, 'parameters')}\n",
        ("", [ADD, WEATHER]),
    ),
    ("llama3_json", '{"no": "call"}', ('{"no": "call"}', [])),
    ("llama3_json", "  plain {text}", ("  plain {text}", [])),
]


@pytest.mark.parametrize(("name", "text", "expected"), TEXTS)
def test_calls_are_found_wherever_the_text_is_cut(
    name: ToolCallFormatName, text: str, expected: Found
) -> None:
    assert read(marked(name), [text]) == expected
    assert read(marked(name), list(text)) == expected
    for cut in range(len(text)):
        assert read(marked(name), [text[:cut], text[cut:]]) == expected


PARTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        written(ADD),
        written(WEATHER),
        "text",
        " ",
        "\n",
        "<",
        "{",
        "é",
    ]
)


@given(
    text=st.lists(PARTS, max_size=8).map("".join),
    cuts=st.lists(st.integers(0, 300), max_size=6),
    name=st.sampled_from(["hermes", "mistral", "llama3_json"]),
)
def test_the_pieces_never_matter(text: str, cuts: list[int], name: ToolCallFormatName) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(edges)]
    assert read(marked(name), pieces) == read(marked(name), [text])


def test_content_is_not_held_back_for_longer_than_needed() -> None:
    reader = MarkedCallReader(of("hermes"), NAMES)
    assert reader.push("Hello <") == [{"content": "Hello"}]
    assert reader.push("b>") == [{"content": " <b>"}]
    assert reader.push("<tool_cal") == []
    assert reader.push("endar>") == [{"content": "<tool_calendar>"}]


def test_one_call_alone_where_there_may_be_no_more() -> None:
    text = f"<tool_call>{written(ADD)}</tool_call><tool_call>{written(WEATHER)}</tool_call>"
    assert read(marked("hermes", 1), [text]) == ("", [ADD])


def test_nesting_without_end_is_content() -> None:
    text = f"<tool_call>{'[' * 100_000}</tool_call>"
    assert read(marked("hermes"), [text]) == (text, [])


@pytest.mark.parametrize(
    ("make", "text", "reason", "expected"),
    [
        (PlainReader, "text", "stop", "stop"),
        (marked("hermes"), "text", "stop", "stop"),
        (marked("hermes"), f"<tool_call>{written(ADD)}</tool_call>", "stop", "tool_calls"),
        (marked("hermes"), f"<tool_call>{written(ADD)}</tool_call>", "length", "length"),
        (lambda: NamedCallReader("add"), "{}", "stop", "stop"),
        (lambda: RequiredCallReader(NAMES), f"[{written(ADD)}]", "stop", "tool_calls"),
        (lambda: RequiredCallReader(NAMES), "[", "length", "length"),
    ],
)
def test_the_finish_reason_tells_calls(
    make: Callable[[], TextReader], text: str, reason: Any, expected: str
) -> None:
    reader = make()
    reader.push(text)
    reader.finish()
    assert reader.finish_reason(reason) == expected
    assert reader.finish_reason(None) is None


def test_a_named_function_gets_the_text_as_its_arguments() -> None:
    assert read(lambda: NamedCallReader("add"), ["", '{"a"', ": 1}"]) == ("", [("add", {"a": 1})])


def test_required_calls_are_read_as_their_schema_says() -> None:
    text = json.dumps([{"name": name, "parameters": values} for name, values in (ADD, WEATHER)])
    assert read(lambda: RequiredCallReader(NAMES), list(text)) == ("", [ADD, WEATHER])
    assert read(lambda: RequiredCallReader(NAMES), [text[:-1]]) == (text[:-1], [])


def test_the_schema_of_required_calls() -> None:
    adds = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema = required_calls([("add", adds), ("weather", {"type": "object"})], None)
    valid = jsonschema_rs.validator_for(schema).is_valid
    assert valid([{"name": "add", "parameters": {"a": 1}}, {"name": "weather", "parameters": {}}])
    assert not valid([])
    assert not valid([{"name": "add", "parameters": {}}])
    assert not valid([{"name": "other", "parameters": {}}])
    one = jsonschema_rs.validator_for(required_calls([("add", {})], 1)).is_valid
    assert one([{"name": "add", "parameters": {}}])
    assert not one([{"name": "add", "parameters": {}}] * 2)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "mistral"),
        ('{% if tools %}{"name": x, "parameters": y}{% endif %}', "llama3_json"),
        ("{{ tools }}", None),
    ],
)
def test_the_template_shows_the_format(template: str, expected: str | None) -> None:
    found = tool_call_format(template, "auto")
    assert (found and found.name) == expected


@pytest.mark.parametrize("template", [None, "{{ messages }}"])
@pytest.mark.parametrize("name", ["auto", "hermes"])
def test_a_template_without_tools_is_refused(
    template: str | None, name: ToolCallFormatName
) -> None:
    with pytest.raises(RequestError, match="chat template knows none"):
        tool_call_format(template, name)
