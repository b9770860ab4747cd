"""`octavo generate`, on engines of the null backend: every expected token is arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from octavo.backends import null
from octavo.backends.manifest import Limits
from octavo.tools.main import app

VOCAB_SIZE = 97


def continuation(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(null.expected_next_token(tokens, VOCAB_SIZE))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def text_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its token i is the word `wi`; its chat template puts `w1` and `w2` around a message."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece("##")
    template = "w1 {{ messages[0].content }}{% if add_generation_prompt %} w2{% endif %}"
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "chat_template.jinja": template.encode(),
    }
    limits = Limits(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, block_size=16)
    path = tmp_path_factory.mktemp("engines") / "text"
    return null.write_engine(path, vocab_size=VOCAB_SIZE, limits=limits, extra_files=files)


def words(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def test_json_has_one_entry_a_prompt(text_engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("w4\nw5 w6")
    command = ["generate", str(text_engine), "--prompt", "w1 w2 w3", "--prompt-file", str(file)]
    result = CliRunner().invoke(app, [*command, "--token-ids", "7,8", "--max-tokens=5", "--json"])
    assert result.exit_code == 0
    shown = json.loads(result.stdout)
    fields = ("prompt", "text", "token_ids", "finish_reason", "num_cached_tokens", "metrics")
    assert all(tuple(entry) == fields for entry in shown)
    assert [entry["prompt"] for entry in shown] == ["w1 w2 w3", "w4\nw5 w6", None]
    for entry, prompt in zip(shown, [[1, 2, 3], [4, 5, 6], [7, 8]], strict=True):
        assert entry["token_ids"] == continuation(prompt, 5)
        assert entry["text"].split() == words(entry["token_ids"]).split()
        assert entry["finish_reason"] == "length"
        assert entry["num_cached_tokens"] == 0
        assert entry["metrics"]["time_to_first_token"] > 0


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_text_is_printed_at_once_or_as_it_comes(text_engine: Path, stream: list[str]) -> None:
    command = ["generate", str(text_engine), "--prompt", "w9", "--max-tokens", "12", *stream]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    assert result.stdout.split() == words(continuation([9], 12)).split()


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_an_engine_without_a_tokenizer_prints_token_ids(
    null_engine: Path, stream: list[str]
) -> None:
    command = ["generate", str(null_engine), "--token-ids", "1,2,3", "--max-tokens", "4", *stream]
    result = CliRunner().invoke(app, command)
    assert result.stdout == ",".join(map(str, continuation([1, 2, 3], 4))) + "\n"


def test_chat_puts_the_prompt_through_the_template(text_engine: Path) -> None:
    command = ["generate", str(text_engine), "--chat", "--prompt", "w5", "--max-tokens=3", "--json"]
    (entry,) = json.loads(CliRunner().invoke(app, command).stdout)
    assert entry["prompt"] == "w1 w5 w2"
    assert entry["token_ids"] == continuation([1, 5, 2], 3)


def test_a_seed_makes_sampling_repeatable(null_engine: Path) -> None:
    command = [
        "generate",
        str(null_engine),
        "--token-ids",
        "3",
        "--temperature",
        "5",
        "--seed",
        "7",
    ]
    first, second = (CliRunner().invoke(app, command).stdout for _ in range(2))
    assert first == second != ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no prompt: give --prompt, --prompt-file or --token-ids"),
        (["--prompt", "a", "--stream", "--json"], "choose one"),
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
        (["--token-ids", "1", "--max-tokens", "0"], "max_tokens is 0"),
        (["--token-ids", "1", "--temperature", "nan"], "temperature is nan"),
        (["--token-ids", "1", "--top-p", "2"], "top_p is 2.0"),
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
