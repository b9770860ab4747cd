"""`octavo diff`: tokens and logits of two engines, with the first divergence located."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.graphs.errors import RequestError
from octavo.tools import console
from octavo.tools.comparison import TIE, PromptComparison

if TYPE_CHECKING:
    from octavo.backends.manifest import Manifest
    from octavo.runtime.text.tokenizer import Tokenizer

_TOKENS_OF_CONTEXT = 8


@console.reports_errors
def diff(
    engine_a: Annotated[Path, typer.Argument(help="Engine folder.")],
    engine_b: Annotated[Path, typer.Argument(help="Engine folder to compare with it.")],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A prompt; repeat it for more.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A file of prompts, one a line.", dir_okay=False)
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to compare per prompt.")] = 64,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest difference of a logit that passes.")
    ] = 1e-3,
    tie_tolerance: Annotated[
        float, typer.Option(min=0.0, help="Logits closer than this may change places.")
    ] = TIE,
    num_threads: Annotated[int | None, typer.Option(min=1, help="Default: all cores.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare two engines of one model; exit with 1 where they differ."""
    from octavo.runtime.text.tokenizer import Tokenizer
    from octavo.tools.comparison import compare
    from octavo.tools.greedy import GreedyDecoder
    from octavo.tools.sample_prompts import tokenized

    with GreedyDecoder(engine_a, num_threads) as a, GreedyDecoder(engine_b, num_threads) as b:
        _require_one_vocabulary(engine_a, a.manifest, engine_b, b.manifest)
        texts = [*(prompt or ()), *_lines(prompt_file)]
        longest = min(one.manifest.limits.max_model_len for one in (a, b))
        prompts = tokenized(engine_a, a.manifest, longest - max_tokens, texts)
        rows = compare(a, b, prompts, max_tokens, tie_tolerance)
        tokenizer = Tokenizer.from_bundle(engine_a, a.manifest.spec)
    passed = all(row.same_tokens and row.max_logit_difference <= tolerance for row in rows)
    if as_json:
        entries = [_as_json(row) for row in rows]
        report = {"passed": passed, "tolerance": tolerance, "tie_tolerance": tie_tolerance}
        console.print_json({**report, "prompts": entries})
    else:
        _print(rows, tolerance)
        for row in rows:
            if row.divergence is not None:
                typer.echo(_located(row, tokenizer))
        typer.echo("the engines agree" if passed else "the engines DIFFER")
    if not passed:
        raise typer.Exit(1)


def _lines(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the prompts in {path} cannot be read: {error}") from None
    return [line for line in lines if line.strip()]


def _require_one_vocabulary(
    path_a: Path, manifest_a: Manifest, path_b: Path, manifest_b: Manifest
) -> None:
    sizes = manifest_a.spec.sampled_vocab_size, manifest_b.spec.sampled_vocab_size
    if sizes[0] != sizes[1]:
        raise console.usage_error(
            f"{path_a} has {sizes[0]} tokens and {path_b} {sizes[1]}: compare engines of one model"
        )
    hashes = [
        {record.sha256 for record in manifest.files if record.path == "tokenizer.json"}
        for manifest in (manifest_a, manifest_b)
    ]
    if hashes[0] != hashes[1]:
        raise console.usage_error(
            f"{path_a} and {path_b} have different tokenizers: compare engines of one model"
        )


def _as_json(row: PromptComparison) -> dict[str, Any]:
    entry: dict[str, Any] = _finite(dataclasses.asdict(row))
    return {**entry, "num_positions": row.num_positions, "same_tokens": row.same_tokens}


def _finite(value: Any) -> Any:
    """Numbers that JSON does not have become null."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print(rows: list[PromptComparison], tolerance: float) -> None:
    table = console.table(
        f"the second engine after the first one's tokens, logits within {tolerance:g}",
        "prompt", "tokens>", "max logit difference>", "at position>", "mean KL (nats)>",
        "equal predictions>", "result",
    )  # fmt: skip
    for row in rows:
        equal = row.same_tokens and row.max_logit_difference <= tolerance
        table.add_row(
            console.one_line(row.prompt),
            str(row.num_prompt_tokens),
            f"{row.max_logit_difference:.2e}",
            str(row.max_difference_position),
            f"{row.mean_kl_divergence:.1e}",
            f"{row.num_equal_predictions} of {row.num_positions}",
            "equal" if equal else "DIFFERENT",
        )
    console.print_tables(table)


def _located(row: PromptComparison, tokenizer: Tokenizer | None) -> str:
    found = row.divergence
    assert found is not None
    before = row.token_ids[max(0, found.index - _TOKENS_OF_CONTEXT) : found.index]
    kind = "a tie" if found.is_tie else "NO tie"

    def text(*ids: int) -> str:
        return f"{list(ids)}" if tokenizer is None else repr(tokenizer.decode(ids))

    return (
        f"{console.one_line(row.prompt)!r} diverges at generated token {found.index} ({kind}), "
        f"after {text(*before)}:\n"
        f"  first engine   {text(found.token_a)} {found.logits_a[0]:.6f}, "
        f"the other's {text(found.token_b)} {found.logits_a[1]:.6f}\n"
        f"  second engine  {text(found.token_b)} {found.logits_b[1]:.6f}, "
        f"the other's {text(found.token_a)} {found.logits_b[0]:.6f}"
    )
