"""Structured outputs: what is refused, which tokens a grammar allows, and whole requests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.graphs.errors import RequestError
from octavo.runtime.llm_engine import LLMEngine
from octavo.runtime.sampling.grammar import GrammarCompiler
from octavo.runtime.sampling.logits_processors import LogitsRow
from octavo.runtime.sampling.sampling_params import SamplingParams
from octavo.runtime.sampling.structured_outputs import StructuredOutputsParams
from octavo.runtime.serving import wire
from octavo.runtime.serving.messages import AddRequest
from octavo.runtime.text.tokenizer import Tokenizer
from tests.unit import tokenizer_kinds as kinds
from tests.unit.async_harness import last
from tests.unit.async_harness import run as run_async
from tests.unit.llm_engines import greedy, ids, run
from tests.unit.runtime_bundles import VOCAB_SIZE, write_text_engine

EOS = kinds.BYTE_EOS
ALPHABET = {chr(byte): None for byte in range(32, 127)}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token a byte, then <s> and </s>."""
    return Tokenizer(kinds.byte_level(), bos_token_id=kinds.BYTE_BOS, eos_token_id=EOS)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, [EOS])


def allowed(follower: Any, history: Sequence[int], vocab_size: int = 258) -> set[int]:
    """The tokens that the next row may have after `history`."""
    row = LogitsRow(
        np.zeros(vocab_size, np.float32), np.array([1], np.int32), np.array(history, np.int32)
    )
    follower(row)
    assert set(np.unique(row.values)) <= {-np.inf, 0.0}
    return set(np.flatnonzero(row.values == 0.0).tolist())


# Parameters


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({}, "has no shape: give exactly one of json, json_object, regex, choice, grammar"),
        ({"json_object": False}, "has no shape"),
        ({"json": {}, "regex": "a"}, "has json and regex"),
        ({"json": "{"}, "the JSON schema cannot be read"),
        ({"json": "[]"}, "of type list"),
        ({"json": {"a": float("nan")}}, "the JSON schema cannot be read"),
        ({"json": {"a": object()}}, "the JSON schema cannot be read"),
        ({"regex": ""}, "regex of structured_outputs is ''"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"regex": "a" * (1 << 18) + "a"}, "has 262145 characters, it may have 262144"),
        ({"grammar": 5}, "grammar of structured_outputs is 5"),
        ({"choice": []}, "choice of structured_outputs is empty"),
        ({"choice": ["a", ""]}, "is empty: every text needs a character"),
        ({"choice": ["a" * 200_000, "b" * 100_000]}, "has 300000 characters"),
        ({"json_object": 1}, "json_object of structured_outputs is 1"),
    ],
)
def test_what_is_no_shape_is_refused(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RequestError, match=re.escape(complaint)):
        StructuredOutputsParams(**values)


def test_a_deeply_nested_schema_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="the JSON schema cannot be read"):
        StructuredOutputsParams(json=schema)


def test_sampling_params_take_a_mapping_and_survive_asdict() -> None:
    params = SamplingParams(structured_outputs={"choice": ["a", "b", "a"]})
    assert params.structured_outputs == StructuredOutputsParams(choice=("a", "b"))
    assert SamplingParams(**asdict(params)) == params
    schema = SamplingParams(structured_outputs=StructuredOutputsParams(json=PERSON))
    assert SamplingParams(**asdict(schema)) == schema


def test_params_travel_to_another_process() -> None:
    params = SamplingParams(structured_outputs={"json": PERSON})
    command = AddRequest(1, [1], "", params, 0)
    assert wire.decode_command(wire.encode_command(command)) == command


@pytest.mark.parametrize("value", ["regex", {"regexp": "a"}, 5])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(RequestError, match="it must have one of choice, grammar, json"):
        SamplingParams(structured_outputs=value)


def test_an_output_without_an_end_is_refused() -> None:
    with pytest.raises(RequestError, match="structured_outputs and ignore_eos"):
        SamplingParams(structured_outputs={"regex": "a"}, ignore_eos=True)


# Grammars


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"json": {"type": "frob"}}, "Invalid type: frob"),
        ({"json": {"not": {}}}, 'Unimplemented keys: ["not"]'),
        ({"json": {"type": "string", "format": "frob"}}, "Unknown format: frob"),
        ({"regex": "(("}, "unclosed group"),
        ({"grammar": "start: nowhere"}, "nowhere"),
        ({"grammar": "begin: /a/"}, "start"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    compiler: GrammarCompiler, values: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(RequestError) as raised:
        compiler.compile(StructuredOutputsParams(**values), ())
    assert str(raised.value).startswith("structured_outputs cannot be followed (")
    assert complaint in str(raised.value)


def test_a_regex_allows_what_continues_it(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    follower = compiler.compile(StructuredOutputsParams(regex="ab?|c[0-9]"), ())
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    digits = {tokenizer.encode(digit)[0] for digit in "0123456789"}
    assert allowed(follower, []) == {a, c}
    assert allowed(follower, [a]) == {b, EOS}
    assert allowed(follower, [a, b]) == {EOS}
    # Drafts were rejected: the history is taken back and goes on elsewhere.
    assert allowed(follower, [c]) == digits
    assert allowed(follower, [c, min(digits)]) == {EOS}
    assert allowed(follower, []) == {a, c}


def test_a_history_that_the_grammar_forbids_is_that_requests_error(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    follower = compiler.compile(StructuredOutputsParams(regex="ab"), ())
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    with pytest.raises(RequestError, match=f"it does not allow the token {c}"):
        allowed(follower, [a, c, b])
    assert allowed(follower, [a]) == {b}  # the row before it is as it was
    assert allowed(follower, [a, b]) == {EOS}


def test_copies_are_followed_on_their_own(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    follower = compiler.compile(StructuredOutputsParams(choice=["ab", "ba"]), ())
    one, other = follower.copy(), follower.copy()
    a, b = (tokenizer.encode(letter)[0] for letter in "ab")
    assert allowed(one, [a]) == {b}
    assert allowed(other, [b]) == {a}
    assert allowed(one, [a, b]) == allowed(other, [b, a]) == {EOS}


def test_stop_tokens_end_a_complete_output(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    stop = tokenizer.encode("!")[0]
    follower = compiler.compile(StructuredOutputsParams(choice=["a"]), [stop])
    (a,) = tokenizer.encode("a")
    assert allowed(follower, []) == {a}
    assert allowed(follower, [a]) == {EOS, stop}


@pytest.mark.parametrize("text", ['a"b', "back\\slash", "line\nend", "naïve 🦀", "{}|()", "\t"])
def test_choices_are_taken_to_the_letter(
    compiler: GrammarCompiler, tokenizer: Tokenizer, text: str
) -> None:
    follower = compiler.compile(StructuredOutputsParams(choice=[text]), ())
    tokens = tokenizer.encode(text)
    for length, token in enumerate(tokens):
        assert allowed(follower, tokens[:length]) == {token}
    assert allowed(follower, tokens) == {EOS}


def test_white_space_in_json_ends(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    follower = compiler.compile(StructuredOutputsParams(json_object=True), ())
    (space,) = tokenizer.encode(" ")
    (brace,) = tokenizer.encode("{")
    assert space in allowed(follower, [brace] + [space] * 39)
    assert space not in allowed(follower, [brace] + [space] * 40)


@pytest.mark.parametrize("make", [kinds.trained_byte_level, kinds.sentence_piece, kinds.metaspace])
def test_every_kind_of_tokenizer_is_followed(make: Any) -> None:
    """The text that comes out, as the tokenizer decodes it, is one of the choices."""
    tokenizer = Tokenizer(make(), eos_token_id=0)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [0])
    follower = compiler.compile(StructuredOutputsParams(choice=["a b", "b b", "ab"]), ())
    for seed in range(8):
        random = np.random.default_rng(seed)
        history: list[int] = []
        one = follower.copy()
        while (options := allowed(one, history, tokenizer.vocab_size)) != {0}:
            history.append(int(random.choice(sorted(options - {0}))))
        assert tokenizer.decode(history) in ("a b", "b b", "ab")


# Requests


@pytest.fixture
def engine(tmp_path: Path) -> LLMEngine:
    """Its best token after any context is arithmetic; `</s>` is the last one."""
    return LLMEngine(write_text_engine(tmp_path / "engine", eos_token_ids=[0]))


def output_of(engine: LLMEngine, **params: Any) -> Any:
    engine.add_request("one", ids([5, 6, 7]), greedy(max_tokens=40, **params))
    (output,) = run(engine)
    return output


def test_a_request_gets_its_shape(engine: LLMEngine) -> None:
    pattern = "(yes|no), [0-9]{3}"
    (completion,) = output_of(engine, structured_outputs={"regex": pattern}).outputs
    assert re.fullmatch(pattern, completion.text)
    assert completion.finish_reason == "stop"


def test_drafts_change_nothing(tmp_path: Path) -> None:
    bundle = write_text_engine(tmp_path / "engine", eos_token_ids=[0])
    pattern = "(ab){4}[a-z]{3}(ab){4}"
    texts = []
    for speculative in (False, "ngram"):
        engine = LLMEngine(bundle, speculative=speculative)
        (completion,) = output_of(engine, structured_outputs={"regex": pattern}).outputs
        texts.append((completion.text, completion.token_ids, completion.finish_reason))
    assert texts[0] == texts[1]
    assert re.fullmatch(pattern, texts[0][0])


def test_each_choice_of_n_has_its_own_grammar(engine: LLMEngine) -> None:
    params = {"temperature": 1.0, "seed": 3, "n": 4}
    output = output_of(engine, structured_outputs={"regex": "[a-p]{4}"}, **params)
    texts = [completion.text for completion in output.outputs]
    assert all(re.fullmatch("[a-p]{4}", text) for text in texts)
    assert len(set(texts)) > 1


def test_limits_that_leave_no_token_end_that_request_alone(engine: LLMEngine) -> None:
    engine.add_request("free", ids([1, 2]), greedy(max_tokens=4))
    bad = greedy(structured_outputs={"choice": ["ab"]}, allowed_token_ids=[1])
    engine.add_request("bound", ids([1, 2]), bad)
    by_id = {output.request_id: output for output in run(engine)}
    assert by_id["free"].error is None
    assert "leave no token to choose" in str(by_id["bound"].error)
    assert "structured_outputs" in str(by_id["bound"].error)


def test_an_engine_without_an_end_token_needs_stop_tokens(tmp_path: Path) -> None:
    engine = LLMEngine(write_text_engine(tmp_path / "engine"))
    with pytest.raises(RequestError, match="no end-of-sequence token: give stop_token_ids"):
        engine.add_request("one", ids([1]), greedy(structured_outputs={"choice": ["ab"]}))
    (completion,) = output_of(
        engine, structured_outputs={"choice": ["ab"]}, stop_token_ids=[VOCAB_SIZE - 1]
    ).outputs
    assert (completion.text, completion.finish_reason) == ("ab", "stop")


def test_without_a_tokenizer_it_is_refused(null_engine: Path) -> None:
    with pytest.raises(RequestError, match="structured_outputs needs a tokenizer"):
        LLMEngine(null_engine).add_request(
            "one", ids([1]), greedy(structured_outputs={"choice": ["ab"]})
        )


def test_without_llguidance_the_extra_is_named(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"needs llguidance .*install `octavo\[serve\]`"):
        output_of(engine, structured_outputs={"choice": ["ab"]})


def test_the_engines_process_follows_and_refuses(tmp_path: Path) -> None:
    from octavo.runtime.async_llm import AsyncLLM

    async def test() -> None:
        bundle = write_text_engine(tmp_path / "engine", eos_token_ids=[0])
        async with AsyncLLM(bundle) as llm:
            params = greedy(structured_outputs={"choice": ["left", "right"]}, max_tokens=9)
            output = await last(llm, ids([1, 2]), params)
            assert output.outputs[0].text in ("left", "right")
            with pytest.raises(RequestError, match="unclosed group"):
                await last(llm, ids([1, 2]), greedy(structured_outputs={"regex": "(("}))
            assert (await last(llm, ids([1, 2]), params)).outputs == output.outputs

    run_async(test())
