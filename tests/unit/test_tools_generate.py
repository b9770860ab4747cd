"""`octavo generate`, on engines of the null backend: every expected token is arithmetic."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.runtime import LLM, SamplingParams
from octavo.tools.main import app
from tests.unit.runtime_bundles import write_text_engine
from tests.unit.word_bundles import VOCAB_SIZE, continuation, words, write_word_engine

# A null engine's logits fall by this from one id to the next one, up to 40 ids away, then by 0.001.
STEP = 0.251
LOGITS = [-0.25 * min(distance, 40) - 0.001 * distance for distance in range(VOCAB_SIZE)]
LIKELIEST = -math.log(sum(map(math.exp, LOGITS)))  # log-probability of the likeliest token
PROMPT = ("--token-ids", "1,2,3")


@pytest.fixture(scope="module")
def text_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its chat template puts `w1` and `w2` around a message."""
    template = "w1 {{ messages[0].content }}{% if add_generation_prompt %} w2{% endif %}"
    path = tmp_path_factory.mktemp("engines") / "text"
    return write_word_engine(path, chat_template=template)


def run_json(engine: Path, *arguments: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["generate", str(engine), *arguments, "--json"])
    assert result.exit_code == 0, result.stderr
    entries: list[dict[str, Any]] = json.loads(result.stdout)
    return entries


def test_json_has_one_entry_a_prompt(text_engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("w4\nw5 w6")
    prompts = ("--prompt", "w1 w2 w3", "--prompt-file", str(file), "--token-ids", "7,8")
    shown = run_json(text_engine, *prompts, "--max-tokens=5")
    assert all(
        tuple(entry) == ("prompt", "outputs", "num_cached_tokens", "metrics") for entry in shown
    )
    assert [entry["prompt"] for entry in shown] == ["w1 w2 w3", "w4\nw5 w6", None]
    for entry, prompt in zip(shown, [[1, 2, 3], [4, 5, 6], [7, 8]], strict=True):
        tokens = continuation(prompt, 5)
        assert entry["outputs"] == [
            {
                "text": words(tokens),
                "token_ids": tokens,
                "finish_reason": "length",
                "stop_reason": None,
                "cumulative_logprob": None,
                "score": None,
                "logprobs": None,
            }
        ]
        assert entry["num_cached_tokens"] == 0
        assert entry["metrics"]["time_to_first_token"] > 0


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_text_is_printed_at_once_or_as_it_comes(text_engine: Path, stream: list[str]) -> None:
    command = ["generate", str(text_engine), "--prompt", "w9", "--max-tokens", "12", *stream]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    assert result.stdout == words(continuation([9], 12)) + "\n"


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_an_engine_without_a_tokenizer_prints_token_ids(
    null_engine: Path, stream: list[str]
) -> None:
    command = ["generate", str(null_engine), *PROMPT, "--max-tokens", "4", *stream]
    result = CliRunner().invoke(app, command)
    assert result.stdout == ",".join(map(str, continuation([1, 2, 3], 4))) + "\n"


def test_chat_puts_the_prompt_through_the_template(text_engine: Path) -> None:
    (entry,) = run_json(text_engine, "--chat", "--prompt", "w5", "--max-tokens=3")
    assert entry["prompt"] == "w1 w5 w2"
    assert entry["outputs"][0]["token_ids"] == continuation([1, 5, 2], 3)


def test_a_seed_makes_sampling_repeatable(null_engine: Path) -> None:
    command = ["generate", str(null_engine), *PROMPT, "--temperature", "5", "--seed", "7"]
    first, second = (CliRunner().invoke(app, command).stdout for _ in range(2))
    assert first == second != ""


def test_every_option_reaches_the_sampling(
    text_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {
        "temperature": 3.0,
        "top_p": 0.9,
        "top_k": 60,
        "min_p": 0.05,
        "repetition_penalty": 1.5,
        "presence_penalty": 1.25,
        "frequency_penalty": -1.5,
        "seed": 3,
        "max_tokens": 40,
        "min_tokens": 30,
        "n": 2,
        "best_of": 4,
        "logprobs": 1,
    }
    used: list[Any] = []
    generate = LLM.generate

    def record(llm: LLM, prompts: Any, params: Any) -> Any:
        used.append(params)
        return generate(llm, prompts, params)

    monkeypatch.setattr(LLM, "generate", record)
    command = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    stops = ("--stop", "w7", "--stop", "w8", "--stop-token-id", "9", "--stop-token-id", "10")
    (entry,) = run_json(text_engine, "--prompt", "w5", *command, *stops)
    assert used == [SamplingParams(stop=("w7", "w8"), stop_token_ids=(9, 10), **options)]
    likelihoods = [output["cumulative_logprob"] for output in entry["outputs"]]
    assert len(likelihoods) == 2
    assert likelihoods == sorted(likelihoods, reverse=True)


def test_a_stop_text_and_a_stop_token_are_named(text_engine: Path) -> None:
    tokens = continuation([5], 6)
    stop = f"w{tokens[3]}"
    (entry,) = run_json(text_engine, "--prompt", "w5", "--stop", "w0w0", "--stop", stop)
    (output,) = entry["outputs"]
    assert (output["finish_reason"], output["stop_reason"]) == ("stop", stop)
    assert output["text"].split() == words(tokens[:3]).split()
    (entry,) = run_json(text_engine, "--prompt", "w5", f"--stop-token-id={tokens[4]}")
    (output,) = entry["outputs"]
    assert (output["finish_reason"], output["stop_reason"]) == ("stop", tokens[4])
    assert output["token_ids"] == tokens[:5]


def test_several_completions_are_numbered(text_engine: Path) -> None:
    command = ["generate", str(text_engine), "--prompt", "w5", "--max-tokens=4", "--seed=1"]
    command += ["--temperature=4", "--n=3"]
    lines = CliRunner().invoke(app, command).stdout.splitlines()
    assert lines[::2] == [f"--- completion {number} of 3" for number in (1, 2, 3)]
    texts = lines[1::2]
    assert len(set(texts)) == 3
    assert all(len(text.split()) == 4 for text in texts)
    lines = CliRunner().invoke(app, [*command, "--prompt", "w6"]).stdout.splitlines()
    assert lines[1:6:2] == texts
    assert lines[6] == "--- prompt 2, completion 1 of 3"
    assert len(lines) == 12


def test_logprobs_are_in_the_json(text_engine: Path) -> None:
    (entry,) = run_json(text_engine, "--prompt", "w5", "--max-tokens=3", "--logprobs=2")
    (output,) = entry["outputs"]
    assert output["cumulative_logprob"] == pytest.approx(3 * LIKELIEST, abs=1e-5)
    for token_id, position in zip(continuation([5], 3), output["logprobs"], strict=True):
        following = (token_id + 1) % VOCAB_SIZE
        assert position == [
            {
                "token_id": token_id,
                "token": f" w{token_id}",
                "logprob": pytest.approx(LIKELIEST, abs=1e-5),
                "rank": 1,
            },
            {
                "token_id": following,
                "token": f" w{following}",
                "logprob": pytest.approx(LIKELIEST - STEP, abs=1e-5),
                "rank": 2,
            },
        ]


def test_a_beam_search_shows_its_scores(text_engine: Path) -> None:
    """Every step of a null engine has the same log-probabilities: the greedy tokens score best."""
    options = ("--prompt", "w5", "--max-tokens=3", "--beam-width=4", "--length-penalty=2")
    (entry,) = run_json(text_engine, *options, "--n=2")
    best, second = entry["outputs"]
    assert best["token_ids"] == continuation([5], 3)
    assert best["finish_reason"] == "length"
    assert best["cumulative_logprob"] == pytest.approx(3 * LIKELIEST, abs=1e-5)
    assert best["score"] == pytest.approx(3 * LIKELIEST / 9, abs=1e-5)
    assert second["score"] == pytest.approx((3 * LIKELIEST - STEP) / 9, abs=1e-5)
    result = CliRunner().invoke(app, ["generate", str(text_engine), *options])
    assert result.stdout == words(continuation([5], 3)) + "\n"
    result = CliRunner().invoke(app, ["generate", str(text_engine), *options, "--n=2"])
    heading, text, *_ = result.stdout.splitlines()
    assert heading == f"--- completion 1 of 2, score {3 * LIKELIEST / 9:.4f}"
    assert text == words(continuation([5], 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no prompt: give --prompt, --prompt-file or --token-ids"),
        (["--prompt", "a", "--stream", "--json"], "choose one"),
        (["--prompt", "a", "--stream", "--n", "2"], "--stream shows one completion"),
        (["--prompt", "a", "--stream", "--best-of", "2"], "--stream shows one completion"),
        (["--prompt", "a", "--stream", "--beam-width", "2"], "--stream shows one completion"),
        (["--prompt", "a", "--logprobs", "2"], "add --json"),
        (["--prompt", "a", "--length-penalty", "2"], "add --beam-width"),
        (
            ["--prompt", "a", "--beam-width", "2", "--top-k", "5", "--best-of", "3"],
            "a beam search does not sample: leave out --top-k, --best-of, or --beam-width",
        ),
        (["--token-ids", "1", "--chat"], "--chat needs text"),
        (["--token-ids", "1,x"], "not '1,x'"),
        (["--prompt-file", "missing.txt"], "missing.txt"),
        (["--prompt", "a", "--max-tokens", "many"], "--max-tokens"),
    ],
)
def test_wrong_usage_exits_with_2(null_engine: Path, options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["generate", str(null_engine), *options])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "hello"], "no tokenizer"),
        (["--prompt", "hello", "--chat"], "no tokenizer"),
        (["--token-ids", "97"], "97"),
        ([*PROMPT, "--max-tokens", "0"], "max_tokens is 0"),
        ([*PROMPT, "--temperature", "nan"], "temperature is nan"),
        ([*PROMPT, "--top-p", "2"], "top_p is 2.0"),
        ([*PROMPT, "--n", "2"], "n must be 1 when using greedy sampling"),
        ([*PROMPT, "--stop", "w7"], "knows no stop texts"),
        ([*PROMPT, "--beam-width", "0"], "beam_width is 0"),
        ([*PROMPT, "--beam-width", "2", "--n", "3"], "n is 3, it must lie in [1, 2]"),
        ([*PROMPT, "--kv-cache-memory", "much"], "kv_cache_memory is 'much'"),
        ([*PROMPT, "--kv-cache-memory", "512"], "raise kv_cache_memory"),
        (["--token-ids", ",".join(["1"] * 256)], "max_model_len 256"),
    ],
)
def test_a_refused_request_is_one_sentence(
    null_engine: Path, options: list[str], message: str
) -> None:
    result = CliRunner().invoke(app, ["generate", str(null_engine), *options])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_file_that_is_no_text_is_refused(null_engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.bin"
    file.write_bytes(b"\xff\xfe\x00")
    result = CliRunner().invoke(app, ["generate", str(null_engine), "--prompt-file", str(file)])
    assert result.exit_code == 2
    assert f"{file} is not UTF-8 text" in result.stderr


@pytest.fixture(scope="module")
def ending_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a token a byte and an end-of-sequence token that is in no text."""
    return write_text_engine(tmp_path_factory.mktemp("engines") / "bytes", eos_token_ids=(187,))


def test_the_text_has_the_form_that_is_asked_for(ending_engine: Path, tmp_path: Path) -> None:
    schema = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], '
    schema += '"additionalProperties": false}'
    file = tmp_path / "schema.json"
    file.write_text(schema)
    for given in (schema, str(file)):
        command = ["generate", str(ending_engine), "--prompt", "x", "--json-schema", given]
        assert json.loads(CliRunner().invoke(app, command).stdout)["a"] in (1, 2)
    command = ["generate", str(ending_engine), "--prompt", "x"]
    assert CliRunner().invoke(app, [*command, "--regex", "ab{2}"]).stdout == "abb\n"
    choices = ["--choice", "yes", "--choice", "no"]
    assert CliRunner().invoke(app, [*command, *choices]).stdout in ("yes\n", "no\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--regex", "a", "--choice", "b"], "regex and choice"),
        (["--json-schema", "no-such-file"], "the path of a file"),
        (["--json-schema", "{"], "json is no JSON text"),
        (["--choice", ""], "a value of choice is empty"),
        (["--regex", "a", "--beam-width", "2"], "no structured output"),
    ],
)
def test_forms_that_make_no_sense(ending_engine: Path, options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["generate", str(ending_engine), "-p", "x", *options])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_form_that_the_engine_refuses(ending_engine: Path) -> None:
    command = ["generate", str(ending_engine), "--prompt", "x", "--regex", "(a"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "unclosed group" in result.stderr
