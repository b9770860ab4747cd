"""The commands as a user types them, on the real engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from octavo.backends.bundle import read_manifest
from octavo.tools.sample_prompts import PROMPTS
from tests.e2e.commands import THREADS, run, script
from tests.e2e.conftest import SMOLLM2

QUESTION = ("--chat", "--prompt", "What is the capital of France?", "--max-tokens", "32")


def output_of(name: str, *arguments: str | Path) -> str:
    done = run(name, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_generate_names_paris(smollm2_engine: Path) -> None:
    (result,) = json.loads(output_of("octavo", "generate", smollm2_engine, *QUESTION, "--json"))
    assert list(result) == ["prompt", "outputs", "num_cached_tokens", "metrics"]
    assert "What is the capital of France?" in result["prompt"]
    assert result["prompt"].count("<|im_start|>user") == 1
    (output,) = result["outputs"]
    assert "Paris" in output["text"]
    assert output["finish_reason"] in ("stop", "length")
    assert 0 < len(output["token_ids"]) <= 32
    assert result["num_cached_tokens"] == 0
    metrics = result["metrics"]
    assert 0 <= metrics["queue_time"] <= metrics["time_to_first_token"] <= metrics["total_time"]
    assert metrics["time_per_output_token"] > 0


def test_a_stream_prints_the_same_text(smollm2_engine: Path) -> None:
    """D01, D08: what is printed piece by piece is what is printed at once."""
    prompts = ("--prompt", "你好,请介绍一下", "--prompt", "Use emoji: 🎉🎉🎉", "--max-tokens", "24")
    at_once = output_of("octavo", "generate", smollm2_engine, *prompts)
    assert output_of("octavo", "generate", smollm2_engine, *prompts, "--stream") == at_once
    assert "\ufffd" not in at_once.rstrip("\n\ufffd")


def test_several_completions_and_beams_of_the_real_model(smollm2_engine: Path) -> None:
    """Of the n likeliest of best_of the likelier comes first; a beam's score is its mean."""
    sampled = ("--temperature", "1", "--seed", "5", "--best-of", "4", "--n", "2")
    results = [
        json.loads(output_of("octavo", "generate", smollm2_engine, *QUESTION, *options, "--json"))
        for options in (sampled, ("--beam-width", "4"))
    ]
    (first, second), (best,) = (result["outputs"] for (result,) in results)
    assert 0 > first["cumulative_logprob"] >= second["cumulative_logprob"]
    assert "Paris" in best["text"]
    mean = best["cumulative_logprob"] / len(best["token_ids"])
    assert best["score"] == pytest.approx(mean, rel=1e-9)


def test_a_chat_of_two_turns_finds_the_first_one_cached(smollm2_engine: Path) -> None:
    """Answers alone are on stdout; the cached tokens are the first turn's, in whole blocks."""
    options = ("--temperature", "0", "--max-tokens", "32")
    done = subprocess.run(
        [script("octavo"), "chat", str(smollm2_engine), *options],
        input="What is the capital of France?\nAnd what is that of Italy?\n",
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **THREADS},
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "Paris" in first
    assert "Rome" in second
    counts = re.findall(r"(\d+) prompt tokens, (\d+) cached", done.stderr)
    (first_prompt, first_cached), (second_prompt, second_cached) = (
        (int(prompt), int(cached)) for prompt, cached in counts
    )
    assert first_cached == 0
    # SmolLM2's template begins both prompts alike, with its own system message.
    assert first_prompt // 16 * 16 <= second_cached < second_prompt
    assert second_cached % 16 == 0


def test_inspect_shows_what_was_built(smollm2_engine: Path) -> None:
    shown: dict[str, Any] = json.loads(
        output_of("octavo", "inspect", smollm2_engine, "--check", "--json")
    )
    manifest = read_manifest(smollm2_engine)
    assert shown["manifest"] == manifest.model_dump(mode="json")
    assert shown["num_layers"] == 30
    assert (shown["runs_here"], shown["reason"], shown["hashes_checked"]) == (True, None, True)
    # 30 layers, keys and values, 3 heads, 16 tokens, 64 elements of 4 bytes.
    assert shown["cache_block_bytes"] == 30 * 2 * 3 * 16 * 64 * 4
    files = [path for path in smollm2_engine.rglob("*") if path.is_file()]
    sizes = {path.name: path.stat().st_size for path in files}
    assert shown["total_size"] == sum(sizes.values()) - sizes["manifest.json"]
    spec = shown["manifest"]["spec"]
    assert (spec["vocab_size"], spec["tie_word_embeddings"]) == (49152, True)
    assert shown["manifest"]["limits"]["max_model_len"] == spec["max_position_embeddings"]


def test_verify_finds_the_engine_equal(smollm2_engine: Path) -> None:
    done = run(
        "octavo", "verify", smollm2_engine, "--model", SMOLLM2, "--max-tokens", "8", "--json"
    )
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert result["passed"] is True
    assert [row["num_tokens"] for row in result["prompts"]] == [8] * len(PROMPTS)
    assert all(row["max_logit_difference"] <= 1e-3 for row in result["prompts"])
