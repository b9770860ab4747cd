"""SmolLM2 made to answer in a form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from octavo.runtime import LLM, SamplingParams
from tests.e2e.conftest import Engines

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(smollm2_engines: Engines) -> Iterator[LLM]:
    with LLM(smollm2_engines["int8"]) as llm:
        yield llm


def answer(llm: LLM, question: str, **form: object) -> str:
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=form)
    (output,) = llm.chat([{"role": "user", "content": question}], params)
    assert output.outputs[0].finish_reason == "stop"
    return output.outputs[0].text


def test_a_person_in_json(llm: LLM) -> None:
    question = "Describe a person named Anna, 31 years old, as JSON with name and age."
    person = json.loads(answer(llm, question, json=PERSON))
    assert list(person) == ["name", "age"]
    assert "Anna" in person["name"]
    assert isinstance(person["age"], int)


def test_a_choice(llm: LLM) -> None:
    colours = ["red", "green", "blue"]
    assert answer(llm, "What colour is grass?", choice=colours) in colours


def test_an_expression(llm: LLM) -> None:
    date = answer(llm, "When did the first man walk on the Moon?", regex=r"\d{4}-\d{2}-\d{2}")
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", date)
