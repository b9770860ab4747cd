"""`octavo diff`: null engines, whose logits are arithmetic, changed at places that are known."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from octavo.backends import null
from octavo.backends.base import Float32Array
from octavo.tools import sample_prompts
from octavo.tools.comparison import compare
from octavo.tools.greedy import GreedyDecoder
from octavo.tools.main import app
from tests.unit.runtime_bundles import LIMITS, write_text_engine

VOCAB_SIZE = 97
PROMPT = [3, 1, 4, 1, 5]


class ChangedAt:
    """A patch of `GreedyDecoder.follow`: at generated token `index`, logits get `changes`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, index: int) -> None:
        self.changes: dict[int, float] = {}
        original = GreedyDecoder.follow

        def follow(
            decoder: GreedyDecoder, prompt: list[int], token_ids: Sequence[int]
        ) -> Float32Array:
            rows = original(decoder, prompt, token_ids)
            for token, change in self.changes.items():
                rows[index, token] += np.float32(change)
            return rows

        monkeypatch.setattr(GreedyDecoder, "follow", follow)


def expected(count: int) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(null.expected_next_token(tokens, VOCAB_SIZE))
    return tokens[len(PROMPT) :]


def test_an_engine_equals_itself(null_engine: Path) -> None:
    with GreedyDecoder(null_engine) as a, GreedyDecoder(null_engine) as b:
        (row,) = compare(a, b, {"prompt": PROMPT}, 6)
    assert list(row.token_ids) == expected(6)
    assert (row.max_logit_difference, row.mean_kl_divergence) == (0.0, 0.0)
    assert row.num_equal_predictions == 6
    assert row.divergence is None
    assert row.same_tokens


def test_the_first_divergence_is_located(
    null_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second best token of a null engine lies 0.251 below the best."""
    best = expected(6)[4]
    other = (best + 1) % VOCAB_SIZE
    ChangedAt(monkeypatch, 4).changes[other] = 0.5
    with GreedyDecoder(null_engine) as a, GreedyDecoder(null_engine) as b:
        (row,) = compare(a, b, {"prompt": PROMPT}, 6)
    assert row.divergence is not None
    assert row.divergence.index == 4
    assert (row.divergence.token_a, row.divergence.token_b) == (best, other)
    assert row.divergence.logits_a == pytest.approx((0.0, -0.251))
    assert row.divergence.logits_b == pytest.approx((0.0, 0.249))
    assert not row.divergence.is_tie
    assert not row.same_tokens
    assert row.num_equal_predictions == 5
    assert row.max_logit_difference == pytest.approx(0.5)
    assert row.max_difference_index == 4


def test_kl_divergence(null_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written out with Python's own floats."""
    best = expected(1)[0]
    patch = ChangedAt(monkeypatch, 0)
    patch.changes[best] = 1.0
    with GreedyDecoder(null_engine) as a, GreedyDecoder(null_engine) as b:
        (row,) = compare(a, b, {"prompt": PROMPT}, 1)
        logits = [float(x) for x in a.follow(PROMPT, [0])[0]]
    patch.changes.clear()
    logits[best] -= 1.0  # the engine's own: `follow` is patched
    weights = [math.exp(x) for x in logits]
    p = [w / sum(weights) for w in weights]
    weights[best] *= math.e
    q = [w / sum(weights) for w in weights]
    wanted = sum(x * math.log(x / y) for x, y in zip(p, q, strict=True))
    assert row.mean_kl_divergence == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("tie", "is_tie"), [(0.2509, False), (0.2512, True)])
def test_what_is_a_tie(
    null_engine: Path, monkeypatch: pytest.MonkeyPatch, tie: float, is_tie: bool
) -> None:
    best = expected(1)[0]
    ChangedAt(monkeypatch, 0).changes[(best + 1) % VOCAB_SIZE] = 0.2511
    with GreedyDecoder(null_engine) as a, GreedyDecoder(null_engine) as b:
        (row,) = compare(a, b, {"prompt": PROMPT}, 1, tie)
    assert row.divergence is not None
    assert row.same_tokens is is_tie


def test_a_logit_that_is_no_number_differs(
    null_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ChangedAt(monkeypatch, 1).changes[5] = math.nan
    result = CliRunner().invoke(app, ["diff", str(null_engine), str(null_engine), "--json"])
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["passed"] is False
    assert report["prompts"][0]["max_logit_difference"] is None


# --- the command ----------------------------------------------------------------------------------


def test_equal_engines(null_engine: Path) -> None:
    result = CliRunner().invoke(app, ["diff", str(null_engine), str(null_engine)])
    assert result.exit_code == 0, result.stderr
    assert "31 random tokens" in result.stdout
    assert result.stdout.endswith("the engines agree\n")


def test_engines_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = write_text_engine(tmp_path / "engine")
    command = ["diff", str(engine), str(engine), "-p", "ab", "--max-tokens", "3"]
    same = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    ChangedAt(monkeypatch, 2).changes[same["prompts"][0]["token_ids"][2]] = -1.0
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "'ab' diverges at generated token 2 (NO tie), after " in result.stdout
    assert result.stdout.endswith("the engines DIFFER\n")
    result = CliRunner().invoke(app, [*command, "--tolerance", "2", "--tie-tolerance", "2"])
    assert result.exit_code == 0
    assert "(a tie)" in result.stdout


def test_prompts_of_a_file(tmp_path: Path) -> None:
    engine = write_text_engine(tmp_path / "engine")
    (tmp_path / "prompts.txt").write_text("ab\n\nabc\n")
    command = ["diff", str(engine), str(engine), "--max-tokens", "2", "--json"]
    result = CliRunner().invoke(app, [*command, "--prompt-file", str(tmp_path / "prompts.txt")])
    assert [one["prompt"] for one in json.loads(result.stdout)["prompts"]] == ["ab", "abc"]
    result = CliRunner().invoke(app, [*command, "--prompt-file", str(tmp_path / "away.txt")])
    assert result.exit_code == 1
    assert "away.txt cannot be read" in result.stderr


def test_the_sample_prompts_are_compared(tmp_path: Path) -> None:
    limits = LIMITS.model_copy(update={"max_model_len": 1024})
    engine = write_text_engine(tmp_path / "engine", limits=limits)
    result = CliRunner().invoke(app, ["diff", str(engine), str(engine), "--json"])
    prompts = [one["prompt"] for one in json.loads(result.stdout)["prompts"]]
    assert prompts == list(sample_prompts.PROMPTS)


def test_engines_of_different_models_are_refused(tmp_path: Path, null_engine: Path) -> None:
    other = write_text_engine(tmp_path / "other")
    result = CliRunner().invoke(app, ["diff", str(null_engine), str(other)])
    assert result.exit_code == 2
    assert "has 97 tokens and" in result.stderr
    same_size = null.write_engine(tmp_path / "untold", vocab_size=257, limits=LIMITS)
    result = CliRunner().invoke(app, ["diff", str(other), str(same_size)])
    assert result.exit_code == 2
    assert "have different tokenizers" in result.stderr
