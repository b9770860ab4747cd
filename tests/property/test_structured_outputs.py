"""Whatever the grammar, the seed and the company: the text has the form that was asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.backends.manifest import Limits
from octavo.runtime import LLM, CompletionOutput, SamplingParams, StructuredOutputsParams
from octavo.runtime.text.tokenizer import Tokenizer
from tests.unit.runtime_bundles import write_text_engine
from tests.unit.tokenizer_kinds import byte_level

LIMITS = Limits(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=32, block_size=4)
# A byte that is in no UTF-8 text.
EOS = Tokenizer(byte_level()).token_table().token_bytes.index(b"\xff")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "text"
    return write_text_engine(path, limits=LIMITS, eos_token_ids=(EOS,))


@pytest.fixture(scope="module")
def llm(engine: Path) -> Iterator[LLM]:
    with LLM(engine) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting(engine: Path) -> Iterator[LLM]:
    with LLM(engine, speculative={"method": "ngram", "prompt_lookup_min": 1}) as llm:
        yield llm


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    leaves: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
        [
            {"type": "integer", "minimum": -5, "maximum": 99},
            {"type": "boolean"},
            {"type": "string", "maxLength": 5},
            {"enum": ["a", 1, None, "é"]},
            {"type": "string", "pattern": "^[a-c]{1,4}$"},
            {"type": "null"},
        ]
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds(lambda items: {"type": "array", "items": items, "maxItems": 3}, inner),
            st.builds(
                lambda properties, num_required: {
                    "type": "object",
                    "properties": properties,
                    "required": list(properties)[:num_required],
                    "additionalProperties": False,
                },
                st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
                st.integers(0, 3),
            ),
            st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
        ),
        max_leaves=4,
    )


def regexes() -> st.SearchStrategy[str]:
    leaves = st.sampled_from(["a", "b", "[a-f]", "\\d", "é", "안", "\\.", " "])
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds("({})({})".format, inner, inner),
            st.builds("({}|{})".format, inner, inner),
            st.builds("({}){{0,3}}b".format, inner),
            st.builds("({})?a".format, inner),
        ),
        max_leaves=5,
    )


def check(params: StructuredOutputsParams, output: CompletionOutput) -> None:
    if output.finish_reason != "stop":
        assert output.finish_reason == "length"
        return
    if params.regex is not None:
        assert re.fullmatch(params.regex, output.text)
    else:
        schema = json.loads(str(params.json))
        assert jsonschema_rs.is_valid(schema, json.loads(output.text))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    forms=st.lists(
        st.one_of(
            st.builds(lambda schema: StructuredOutputsParams(json=schema), schemas()),
            st.builds(lambda regex: StructuredOutputsParams(regex=regex), regexes()),
        ),
        min_size=1,
        max_size=4,
    ),
    temperature=st.sampled_from([0.0, 1.0, 5.0, 50.0]),
    seed=st.integers(0, 1000),
)
def test_the_text_has_its_form_and_does_not_depend_on_the_schedule(
    llm: LLM,
    drafting: LLM,
    forms: list[StructuredOutputsParams],
    temperature: float,
    seed: int,
) -> None:
    free = SamplingParams(temperature=temperature, seed=seed, max_tokens=100)
    params = [*(replace(free, structured_outputs=form) for form in forms), free]
    prompts = [{"prompt_token_ids": [index + 1, 50, 60]} for index in range(len(params))]
    alone = [
        llm.generate(prompt, one)[0].outputs for prompt, one in zip(prompts, params, strict=True)
    ]
    assert [output.outputs for output in llm.generate(prompts, params)] == alone
    assert [output.outputs for output in drafting.generate(prompts, params)] == alone
    for form, (output,) in zip(forms, alone[:-1], strict=True):
        check(form, output)
