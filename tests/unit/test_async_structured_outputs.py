"""Structured output through AsyncLLM, in a thread and in a child process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest

from octavo.graphs.errors import RequestError
from octavo.runtime import LLM, SamplingParams, StructuredOutputsParams
from octavo.runtime.async_llm import AsyncLLM
from tests.unit.async_harness import assert_idle, last, run, write_long_engine

EOS = 187  # the byte 0xFF, which is in no UTF-8 text
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}}
FORM = StructuredOutputsParams(json={**SCHEMA, "required": ["a"], "additionalProperties": False})
PARAMS = SamplingParams(temperature=0, max_tokens=30, structured_outputs=FORM)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("async") / "engine"
    return write_long_engine(path, eos_token_ids=(EOS,))


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_the_same_text_as_without_and_errors_of_one_request_alone(
    engine: Path, kind: Literal["process", "thread"]
) -> None:
    with LLM(engine) as llm:
        expected = llm.generate("ab", PARAMS)[0].outputs[0].text
    assert list(json.loads(expected)) == ["a"]
    wrong = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(a"))

    async def test() -> None:
        async with AsyncLLM(engine, engine=kind) as llm:
            assert (await last(llm, "ab", PARAMS)).outputs[0].text == expected
            with pytest.raises(RequestError, match="unclosed group"):
                await anext(llm.generate("ab", wrong))
            assert (await last(llm, "ab", PARAMS)).outputs[0].text == expected
            await assert_idle(llm)

    run(test())
