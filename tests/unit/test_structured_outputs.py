"""Structured output: its parameters, its errors and its masks, worked out by hand."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
import tokenizers

from octavo.graphs.errors import RequestError
from octavo.runtime import LLM, SamplingParams, StructuredOutputsParams
from octavo.runtime.sampling.grammar_mask import GrammarMask
from octavo.runtime.sampling.grammars import GrammarCompiler
from octavo.runtime.sampling.logits_processors import LogitsRow
from octavo.runtime.serving import messages, wire
from octavo.runtime.text.tokenizer import Tokenizer
from tests.unit.runtime_bundles import write_text_engine
from tests.unit.tokenizer_kinds import (
    byte_level,
    id_of,
    metaspace,
    plain_words,
    sentence_piece,
    trained_byte_level,
    word_piece,
    word_suffixes,
)

EOS = 255  # a byte that is in no UTF-8 text
BYTE_IDS = {
    byte: index
    for index, byte in enumerate(
        Tokenizer(byte_level()).token_table().token_bytes[:256]  # one byte each
    )
}
PROMPT = {"prompt_token_ids": [5, 6, 7]}


def ids(text: str) -> list[int]:
    return [BYTE_IDS[bytes([byte])] for byte in text.encode()]


EOS_ID = BYTE_IDS[bytes([EOS])]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_engine(tmp_path_factory.mktemp("engine") / "text", eos_token_ids=(EOS_ID,))


@pytest.fixture(scope="module")
def llm(engine: Path) -> Iterator[LLM]:
    with LLM(engine) as llm:
        yield llm


def allowed(mask: GrammarMask, output: Sequence[int], vocab_size: int = 257) -> list[int]:
    row = LogitsRow(
        np.zeros(vocab_size, np.float32), np.array([1], np.int32), np.array(output, np.int32)
    )
    mask(row)
    tokens: list[int] = np.flatnonzero(np.isfinite(row.values)).tolist()
    return tokens


def mask(
    backend: tokenizers.Tokenizer | None = None, vocab_size: int = 257, **options: Any
) -> GrammarMask:
    ends = {
        name: options.pop(name, default)
        for name, default in (
            ("eos_token_ids", [EOS_ID]),
            ("stop_token_ids", []),
            ("ignore_eos", False),
        )
    }
    compiler = GrammarCompiler(Tokenizer(backend or byte_level()), vocab_size)
    return GrammarMask(compiler.compile(StructuredOutputsParams(**options)), **ends)


def test_only_what_may_follow_is_allowed() -> None:
    one = mask(regex="ab?c?")
    assert allowed(one, []) == ids("a")
    assert allowed(one, ids("a")) == sorted([*ids("bc"), EOS_ID])
    assert allowed(one, ids("ab")) == sorted([*ids("c"), EOS_ID])
    assert allowed(one, ids("abc")) == [EOS_ID]


def test_a_history_that_shrinks_or_differs_is_followed() -> None:
    one = mask(regex="(ab|cd)*")
    assert allowed(one, ids("abcd")) == sorted([*ids("ac"), EOS_ID])
    assert allowed(one, ids("abc")) == ids("d")
    assert allowed(one, ids("a")) == ids("b")
    assert allowed(one, ids("cdc")) == ids("d")
    assert allowed(one, []) == sorted([*ids("ac"), EOS_ID])


def test_a_history_outside_the_grammar_is_an_error_and_no_more() -> None:
    one = mask(regex="abc")
    assert allowed(one, ids("a")) == ids("b")
    for wrong in (ids("ax"), [*ids("abc"), EOS_ID], ids("abca"), [256]):
        with pytest.raises(RequestError, match="do not follow the grammar"):
            allowed(one, wrong)
        assert allowed(one, ids("ab")) == ids("c")


def test_stop_tokens_are_allowed_where_the_text_may_end_and_where_the_grammar_has_them() -> None:
    (a, x) = ids("ax")
    one = mask(regex="[ab]+", stop_token_ids=[a, x])
    assert allowed(one, []) == ids("ab")
    assert allowed(one, ids("b")) == sorted([*ids("abx"), EOS_ID])


def test_ignore_eos_goes_on_as_long_as_it_can() -> None:
    one = mask(regex="a{1,3}", ignore_eos=True)
    assert allowed(one, ids("a")) == ids("a")
    assert allowed(one, ids("aaa")) == [EOS_ID]


def test_choices_that_begin_alike() -> None:
    one = mask(choice=["ab", "abc", 'q"\\\n'])
    assert allowed(one, []) == sorted(ids("aq"))
    assert allowed(one, ids("ab")) == sorted([*ids("c"), EOS_ID])
    assert allowed(one, ids('q"\\\n')) == [EOS_ID]


def test_padding_of_the_vocabulary_and_ids_the_model_lacks() -> None:
    assert allowed(mask(regex="a+", vocab_size=300), ids("a"), 300) == sorted([*ids("a"), EOS_ID])
    small = max(*ids("a"), 100)
    assert allowed(mask(regex="a+", eos_token_ids=[0], vocab_size=small), [], small) == ids("a")


def test_json_is_laid_out_as_python_does_unless_the_schema_says_otherwise() -> None:
    schema: dict[str, Any] = {"type": "array", "items": {"const": 1}, "minItems": 2}
    assert allowed(mask(json=schema), ids("[1,")) == ids(" ")
    schema["x-guidance"] = {"item_separator": ","}
    assert allowed(mask(json=schema), ids("[1,")) == ids("1")


@pytest.mark.parametrize(
    "backend",
    [byte_level(), trained_byte_level(), sentence_piece(), sentence_piece("gemma")],
    ids=["bytes", "byte-level BPE", "llama", "gemma"],
)
def test_random_tokens_that_are_allowed_read_as_the_grammar_says(
    backend: tokenizers.Tokenizer,
) -> None:
    tokenizer = Tokenizer(backend)
    vocab_size = len(tokenizer.token_table().token_bytes)
    schema = {"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 4}
    eos = id_of(backend, "</s>")
    rng = np.random.default_rng(1)
    for _ in range(20):
        one = mask(backend, vocab_size, json=schema, eos_token_ids=[eos])
        output: list[int] = []
        while len(output) < 200:
            token = int(rng.choice(allowed(one, output, vocab_size)))
            if token == eos:
                break
            output.append(token)
        texts = json.loads(tokenizer.decode(output))
        assert len(texts) <= 4
        assert all(len(text) <= 9 for text in texts)


def test_a_first_token_that_loses_its_space_is_not_taken_for_one_that_has_it() -> None:
    backend = sentence_piece()
    vocab_size = backend.get_vocab_size()
    a, spaced = id_of(backend, "a"), id_of(backend, "▁a")
    first = allowed(mask(backend, vocab_size, regex=" ?a a", eos_token_ids=[2]), [], vocab_size)
    assert a in first
    assert spaced not in first
    one = mask(backend, vocab_size, regex=" ?a a", eos_token_ids=[2])
    assert spaced in allowed(one, [a], vocab_size)


def test_metaspace_pieces_are_words_with_their_spaces() -> None:
    backend = metaspace()
    b, spaced = id_of(backend, "b"), id_of(backend, "▁a")
    one = mask(backend, backend.get_vocab_size(), regex="b a", eos_token_ids=[1])
    assert allowed(one, [], backend.get_vocab_size()) == [b]
    assert spaced in allowed(one, [b], backend.get_vocab_size())


@pytest.mark.parametrize("kind", [word_piece, plain_words, word_suffixes])
def test_tokenizers_whose_tokens_have_no_text_of_their_own_are_refused(kind: Any) -> None:
    with pytest.raises(RequestError, match="depend on their neighbours"):
        mask(kind(), regex="a")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "has nothing, it must have exactly one of"),
        ({"json_object": False}, "has nothing"),
        ({"regex": "a", "choice": ["b"]}, "has regex and choice"),
        ({"json": "{"}, "json is no JSON text"),
        ({"json": "[" * 60_000}, "json is no JSON text"),
        ({"json": "3"}, "json is of type int"),
        ({"json": {"a": {1, 2}}}, "can not be written as JSON"),
        ({"regex": 3}, "regex is of type int"),
        ({"regex": ""}, "regex is empty"),
        ({"regex": "a" * 70_000}, "regex has 70000 characters, at most 65536"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"choice": []}, "choice is empty"),
        ({"choice": [""]}, "a value of choice is empty"),
        ({"choice": ["a" * 60_000, "b" * 60_000]}, "120000 characters"),
        ({"grammar": "start: " + "(" * 2000}, "2001 colons and opening brackets"),
        ({"grammar": "start: A\nA: /a/" + "& /a/" * 5}, "5 times &"),
        ({"grammar": 'start: %json {"multipleOf": 7}'}, "a schema with multipleOf"),
        ({"json_object": 3}, "json_object is 3"),
        ({"json": {"$ref": "#/$defs/0", "$defs": {str(i): {} for i in range(2000)}}}, r"has \$ref"),
        ({"json": {"type": "integer", "multipleOf": 1_000_003}}, "multipleOf"),
        ({"json": {"type": "number", "multipleOf": 1e300}}, "multipleOf"),
    ],
)
def test_parameters_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        StructuredOutputsParams(**options)


def test_a_mapping_is_taken_and_an_unknown_key_is_not() -> None:
    assert SamplingParams(
        structured_outputs={"regex": "a"}
    ).structured_outputs == StructuredOutputsParams(regex="a")
    with pytest.raises(RequestError, match="unknown key 'regexp'"):
        SamplingParams(structured_outputs={"regexp": "a"})
    with pytest.raises(RequestError, match="structured_outputs is 'a'"):
        SamplingParams(structured_outputs="a")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"json": {"type": "string"}}, {"choice": ["a", "b"]}, {"json_object": True}]
)
def test_parameters_survive_asdict_and_the_wire(options: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**options))
    assert SamplingParams(**dataclasses.asdict(params)) == params
    command = messages.AddRequest(1, [1], "", params, 0)
    assert wire.decode_command(wire.encode_command(command)) == command


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json": {"type": "banana"}}, "Invalid type: banana"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": "false"}, "cannot be compiled"),
        ({"json": {"$ref": "#"}}, "allows no text"),
        ({"json": {"$ref": "http://localhost/x"}}, "cannot be compiled"),
        ({"json": {"type": "array", "minItems": 2, "maxItems": 1}}, "cannot be compiled"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(" * 60_000}, "cannot be compiled"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "[a&&b]"}, "allows no text"),
        ({"grammar": "start: missing"}, "unknown name"),
        ({"grammar": "start: start"}, "allows no text"),
        ({"grammar": "start: " + "(" * 600 + '"a"' + ")" * 600}, "too deeply nested"),
    ],
)
def test_grammars_that_are_refused_before_anything_is_queued(
    llm: LLM, options: dict[str, Any], message: str
) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**options))
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate(PROMPT, params)
    assert "\n" not in str(caught.value)
    assert not llm.engine.has_unfinished_requests


@pytest.mark.parametrize("regex", ["(((a{1000}){1000}){1000})", "(a?){5000}a{5000}", "a" * 60_000])
def test_expressions_of_a_billion_states_cost_no_more_than_what_is_used(
    llm: LLM, regex: str
) -> None:
    params = SamplingParams(max_tokens=5, structured_outputs={"regex": regex})
    assert llm.generate(PROMPT, params)[0].outputs[0].text == "aaaaa"


def test_a_grammar_that_becomes_too_complex_is_an_error_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = functools.partial(llguidance.LLParserLimits, step_max_items=20)
    monkeypatch.setattr(llguidance, "LLParserLimits", limits)
    one = mask(json={"type": "array", "items": {"type": "object"}})
    allowed(one, ids('[{"abc": 1.5, "d"'))
    with pytest.raises(RequestError, match="has become too complex"):
        allowed(one, ids('[{"abc": 1.5, "d": ['))
    assert allowed(one, []) == ids("[")


def test_chains_as_long_as_they_may_be_do_not_overflow(llm: LLM) -> None:
    defs: dict[str, Any] = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(690)}
    schema = {"$ref": "#/$defs/0", "$defs": {**defs, "690": {"const": 1}}}
    rules = "".join(f"a{i}:a{i + 1}\n" for i in range(690))
    for options in ({"json": schema}, {"grammar": f'start:a0\n{rules}a690:"1"'}):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**options))
        assert llm.generate(PROMPT, params)[0].outputs[0].text == "1"


def test_without_the_library_the_request_says_what_to_install(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with LLM(engine) as llm, pytest.raises(RequestError, match=r"install octavo\[serve\]"):
        llm.generate(PROMPT, SamplingParams(structured_outputs={"regex": "a"}))


def test_engines_without_a_tokenizer_or_an_end_are_refused(
    null_engine: Path, tmp_path: Path
) -> None:
    params = SamplingParams(structured_outputs={"regex": "ab"})
    with LLM(null_engine) as llm, pytest.raises(RequestError, match="needs a tokenizer"):
        llm.generate(PROMPT, params)
    with LLM(write_text_engine(tmp_path / "endless")) as llm:
        with pytest.raises(RequestError, match="give stop_token_ids"):
            llm.generate(PROMPT, params)
        stopped = dataclasses.replace(params, stop_token_ids=[EOS_ID])
        assert llm.generate(PROMPT, stopped)[0].outputs[0].text == "ab"


def test_it_works_beside_every_other_parameter(llm: LLM) -> None:
    params = SamplingParams(
        n=3,
        temperature=2.0,
        seed=1,
        logprobs=1,
        min_tokens=3,
        presence_penalty=1.0,
        repetition_penalty=1.3,
        max_tokens=20,
        structured_outputs={"regex": "[ab]{2,6}"},
    )
    (output,) = llm.generate(PROMPT, params)
    texts = [completion.text for completion in output.outputs]
    assert all(3 <= len(text) <= 6 and set(text) <= {"a", "b"} for text in texts)
    assert len(set(texts)) > 1
    for completion in output.outputs:
        assert completion.finish_reason == "stop"
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids)
    assert llm.generate(PROMPT, params)[0].outputs == output.outputs
    stopped = SamplingParams(stop="b", structured_outputs={"regex": "aabaa"})
    assert llm.generate(PROMPT, stopped)[0].outputs[0].text == "aa"


def test_limits_that_leave_no_token_fail_that_request_alone(llm: LLM) -> None:
    params = SamplingParams(allowed_token_ids=ids("x"), structured_outputs={"regex": "ab"})
    with pytest.raises(RequestError, match="or structured_outputs"):
        llm.generate(PROMPT, params)
    too_short = SamplingParams(min_tokens=5, structured_outputs={"regex": "ab"})
    with pytest.raises(RequestError, match="min_tokens"):
        llm.generate(PROMPT, too_short)


def test_drafts_that_break_the_grammar_change_nothing(engine: Path) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=30, structured_outputs={"regex": "(abc|abd){8}"}
    )
    prompt = {"prompt_token_ids": ids("abcabdabcabdx")}
    with LLM(engine) as plain, LLM(engine, speculative="ngram") as drafting:
        (expected,) = plain.generate(prompt, params)
        (drafted,) = drafting.generate(prompt, params)
        assert drafted.outputs == expected.outputs
        assert drafting.metrics()["spec_decode_num_draft_tokens"]


def test_the_vocabulary_is_read_once_for_all_requests(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = []
    token_table = Tokenizer.token_table

    def count(tokenizer: Tokenizer) -> Any:
        tables.append(1)
        return token_table(tokenizer)

    monkeypatch.setattr(Tokenizer, "token_table", count)
    with LLM(engine) as llm:
        for regex in ("a", "b", "a"):
            params = SamplingParams(structured_outputs={"regex": regex})
            assert llm.generate(PROMPT, params)[0].outputs[0].text == regex
    assert tables == [1]


def test_the_examples_of_the_documentation(llm: LLM) -> None:
    text = (Path(__file__).parents[2] / "docs" / "structured-output.md").read_text("utf-8")
    names: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    shapes = {"by_schema": None, "by_expression": r"\d{4}-\d\d-\d\d", "by_choice": "yes|no"}
    for name, shape in shapes.items():
        params = dataclasses.replace(names[name], seed=1, temperature=50.0)
        (output,) = llm.generate(PROMPT, params)[0].outputs
        if output.finish_reason == "stop" and shape is not None:
            assert re.fullmatch(shape, output.text)
        assert shape is not None or output.text.startswith('{"name": "')
    allowed_by_schema = llm.generate(PROMPT, names["by_schema"])[0].outputs[0].text
    assert allowed_by_schema.startswith('{"name": "')
