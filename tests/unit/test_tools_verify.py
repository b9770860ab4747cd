"""`octavo verify`, with a reference that is arithmetic like the null engine itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from octavo.backends import null
from octavo.backends.base import Float32Array
from octavo.backends.bundle import MANIFEST_NAME, read_manifest
from octavo.graphs.errors import RequestError
from octavo.tools import verify
from octavo.tools.greedy import GreedyDecoder
from octavo.tools.main import app

VOCAB_SIZE = 97


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(null.expected_next_token(tokens, VOCAB_SIZE))
    return tokens[len(prompt) :]


def test_greedy_decoding_prefills_in_chunks_and_follows_positions(null_engine: Path) -> None:
    prompt = [(7 * i) % VOCAB_SIZE for i in range(150)]  # more than twice the budget of 64
    with GreedyDecoder(null_engine) as decoder:
        long = decoder.decode(prompt, 40)
        short = decoder.decode([5], 3)
    assert list(long.token_ids) == expected(prompt, 40)
    assert list(short.token_ids) == expected([5], 3)
    assert int(long.logits[0].argmax()) == long.token_ids[0]


def test_greedy_decoding_refuses_what_does_not_fit(null_engine: Path) -> None:
    with GreedyDecoder(null_engine) as decoder:
        assert len(decoder.decode([1] * 250, 6).token_ids) == 6
        with pytest.raises(RequestError, match="max_model_len of 256"):
            decoder.decode([1] * 250, 7)
        with pytest.raises(RequestError, match="no tokens"):
            decoder.decode([], 1)


def test_predictions_follow_what_is_given(null_engine: Path) -> None:
    prompt, given = [(7 * i) % VOCAB_SIZE for i in range(150)], [5, 6, 7, 8]
    with GreedyDecoder(null_engine) as decoder:
        predicted = decoder.predict(prompt, given)
    contexts = [prompt + given[:count] for count in range(4)]
    assert predicted == [expected(context, 1)[0] for context in contexts]


def reference_of(
    engine: Path, monkeypatch: pytest.MonkeyPatch, edit: str = "none", at: int = 2
) -> None:
    """Replaces the checkpoint's model by the null engine's own logits, edited at one token."""

    def references(
        model: str, spec: object, prompts: list[list[int]], max_tokens: int
    ) -> list[verify.Reference]:
        assert model == "checkpoint"
        assert spec is not None
        results = []
        for prompt in prompts:
            tokens = expected(prompt, max_tokens)
            with GreedyDecoder(engine) as decoder:
                contexts = [prompt + tokens[:step] for step in range(max_tokens)]
                rows = [decoder.decode(context, 1).logits[0] for context in contexts]
            logits: Float32Array = np.stack(rows)
            if edit != "none":
                best, other = tokens[at], (tokens[at] + 1) % VOCAB_SIZE
                lead = {"tie": 5e-4, "wrong": 0.5, "nan": np.nan}[edit]
                logits[at, other] = logits[at, best] + lead
                tokens[at] = other
            results.append(verify.Reference(tuple(tokens), logits))
        return results

    monkeypatch.setattr(verify, "_references", references)


COMMAND = ["--model", "checkpoint", "--max-tokens", "6"]


def run(engine: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["verify", str(engine), *COMMAND, *options])
    return result.exit_code, result.stdout


def test_an_equal_engine_passes(null_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference_of(null_engine, monkeypatch)
    code, output = run(null_engine, "--json")
    shown = json.loads(output)
    assert code == 0
    assert shown["passed"] is True
    assert [entry["num_prompt_tokens"] for entry in shown["prompts"]] == [1, 7, 31]
    for entry in shown["prompts"]:
        assert entry["max_logit_difference"] == 0.0
        assert (entry["num_tokens"], entry["num_equal_tokens"]) == (6, 6)
        assert (entry["first_divergence"], entry["is_tie"]) == (None, False)


def test_a_tie_of_the_reference_passes(null_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference_of(null_engine, monkeypatch, "tie")
    code, output = run(null_engine, "--json")
    entry = json.loads(output)["prompts"][0]
    assert code == 0
    assert (entry["num_equal_tokens"], entry["first_divergence"], entry["is_tie"]) == (2, 2, True)


def test_another_token_fails(null_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference_of(null_engine, monkeypatch, "wrong")
    code, output = run(null_engine)
    assert code == 1
    assert "2 of 6" in output
    assert "token 2" in output
    assert output.count("DIFFERENT") == 3


@pytest.mark.parametrize("edit", ["wrong", "nan"])
def test_other_logits_at_the_prompt_fail(
    null_engine: Path, monkeypatch: pytest.MonkeyPatch, edit: str
) -> None:
    reference_of(null_engine, monkeypatch, edit, at=0)
    code, output = run(null_engine, "--json")
    shown = json.loads(output)
    assert (code, shown["passed"]) == (1, False)
    difference = shown["prompts"][0]["max_logit_difference"]
    assert difference is None if edit == "nan" else difference > 0.4


@pytest.mark.parametrize("edit", ["none", "wrong"])
def test_a_quantised_engine_is_judged_by_its_predictions(
    null_engine: Path, monkeypatch: pytest.MonkeyPatch, edit: str
) -> None:
    reference_of(null_engine, monkeypatch, edit, at=5)
    manifest = read_manifest(null_engine)
    quantised = manifest.model_copy(update={"quantization": "int8"})
    (null_engine / MANIFEST_NAME).write_text(quantised.model_dump_json())
    code, output = run(null_engine, "--json", "--agreement", "0.9")
    shown = json.loads(output)
    # The last of the six tokens of each of three prompts is another.
    share = {"none": 1.0, "wrong": 15 / 18}[edit]
    assert shown["agreement"] == pytest.approx(share)
    assert (code, shown["passed"]) == ((0, True) if edit == "none" else (1, False))
    assert run(null_engine, "--agreement", "0.8")[0] == 0
    assert f"{share:.1%}" in run(null_engine)[1]


def test_a_text_prompt_needs_a_tokenizer(null_engine: Path) -> None:
    result = CliRunner().invoke(app, ["verify", str(null_engine), *COMMAND, "--prompt", "hello"])
    assert result.exit_code == 1
    assert result.stderr == (
        f"error: {null_engine} has no tokenizer: leave out --prompt and random token ids are "
        "compared\n"
    )


def test_a_missing_library_is_one_sentence(
    null_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def references(*arguments: object) -> list[verify.Reference]:
        raise ModuleNotFoundError(f"no torch for {len(arguments)} arguments", name="torch.nn")

    monkeypatch.setattr(verify, "_references", references)
    result = CliRunner().invoke(app, ["verify", str(null_engine), *COMMAND])
    assert result.exit_code == 1
    assert result.stderr == (
        "error: this needs torch, which is not installed: install `octavo[build]`\n"
    )


def test_the_model_must_be_named(null_engine: Path) -> None:
    result = CliRunner().invoke(app, ["verify", str(null_engine)])
    assert result.exit_code == 2
    assert "--model" in result.stderr
