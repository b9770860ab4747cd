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
from octavo.tools.greedy import Continuation, GreedyDecoder
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
    assert row.num_equal_predictions == row.num_positions == 5 + 6 - 1
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
    assert row.num_equal_predictions == 9
    assert row.max_logit_difference == pytest.approx(0.5)
    assert row.max_difference_position == 4 + 4  # token 0 is chosen by the prompt's last position


def test_kl_divergence(null_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written out with Python's own floats; it is 0 at four of five positions."""
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
    assert row.mean_kl_divergence == pytest.approx(wanted / 5, rel=1e-5)


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


def test_what_follows_a_tie_is_compared_too(
    null_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 1 the two best lie 1e-4 apart in both engines, at 3 they lie 0.251 apart in the first."""
    best = expected(4)
    original = GreedyDecoder.follow, GreedyDecoder.decode

    def raised(rows: Float32Array, index: int, change: float) -> None:
        rows[index, (best[index] + 1) % VOCAB_SIZE] += np.float32(change)

    def decode(decoder: GreedyDecoder, prompt: list[int], max_tokens: int) -> Continuation:
        first = original[1](decoder, prompt, max_tokens)
        raised(first.logits, 1, 0.2509)
        return first

    def follow(decoder: GreedyDecoder, prompt: list[int], token_ids: Sequence[int]) -> Float32Array:
        rows = original[0](decoder, prompt, token_ids)
        raised(rows, 1, 0.2511)
        raised(rows, 3, 0.2511)
        return rows

    monkeypatch.setattr(GreedyDecoder, "decode", decode)
    monkeypatch.setattr(GreedyDecoder, "follow", follow)
    with GreedyDecoder(null_engine) as a, GreedyDecoder(null_engine) as b:
        (row,) = compare(a, b, {"prompt": PROMPT}, 4)
    assert [(one.index, one.is_tie) for one in row.divergences] == [(1, True), (3, False)]
    assert row.divergence == row.divergences[1]
    assert not row.same_tokens


def test_every_position_of_a_prompt_is_compared(
    null_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of the engine's 64 tokens; the second engine's logits at position 70 are changed."""
    prompt = [(7 * i) % VOCAB_SIZE for i in range(150)]
    starts: list[int] = []
    original = GreedyDecoder.read

    def read(decoder: GreedyDecoder, token_ids: list[int], num_computed: int) -> Float32Array:
        rows = original(decoder, token_ids, num_computed)
        starts.append(num_computed)
        contexts = [prompt[: num_computed + count + 1] for count in range(len(token_ids))]
        following = [null.expected_next_token(context, VOCAB_SIZE) for context in contexts]
        assert rows.argmax(axis=1).tolist() == following
        if decoder is b and num_computed == 64:
            rows[6, following[6]] -= np.float32(2.0)
        return rows

    monkeypatch.setattr(GreedyDecoder, "read", read)
    with GreedyDecoder(null_engine) as a, GreedyDecoder(null_engine) as b:
        (row,) = compare(a, b, {"prompt": prompt}, 3)
    assert starts == [0, 0, 64, 64, 128, 128]
    assert row.max_logit_difference == 2.0
    assert row.max_difference_position == 70
    assert (row.num_positions, row.num_equal_predictions) == (152, 151)
    assert row.divergences == ()


def test_the_shorter_engine_limits_what_is_compared(tmp_path: Path) -> None:
    """What is given is refused where it does not fit; the prompts of our own are cut."""
    short = LIMITS.model_copy(update={"max_model_len": 24})
    a, b = write_text_engine(tmp_path / "a"), write_text_engine(tmp_path / "b", limits=short)
    command = ["diff", str(a), str(b), "--max-tokens", "4"]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.stderr
    shown = json.loads(result.stdout)["prompts"]
    wanted = [min(20, len(one.encode())) for one in sample_prompts.PROMPTS]
    assert [one["num_prompt_tokens"] for one in shown] == wanted
    assert [one["num_positions"] for one in shown] == [count + 3 for count in wanted]
    result = CliRunner().invoke(app, [*command, "-p", "a prompt of 25 letters .."])
    assert result.exit_code == 1
    assert "25 tokens and 4 to generate exceed the engine's max_model_len of 24" in result.stderr


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
