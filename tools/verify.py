"""`octavo verify`: an engine's logits and greedy tokens against the checkpoint's own model.

A quantised engine has other logits on purpose. What it has to have in common are predictions: after
the tokens of the reference, the most likely next token is nearly always the same.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from octavo.tools import console
from octavo.tools.comparison import TIE

if TYPE_CHECKING:
    from octavo.backends.base import Float32Array
    from octavo.graphs.spec import ModelSpec
    from octavo.tools.greedy import Continuation


@dataclass(frozen=True)
class Reference:
    """What the checkpoint's own model makes of one prompt, with `do_sample=False`."""

    token_ids: tuple[int, ...]
    logits: Float32Array  # [len(token_ids), V], those each token was chosen from


@dataclass(frozen=True)
class Comparison:
    prompt: str
    num_prompt_tokens: int
    max_logit_difference: float
    num_tokens: int
    num_equal_tokens: int
    first_divergence: int | None  # index of the first generated token that differs
    is_tie: bool  # whether the reference's two best logits there lie within TIE
    passed: bool


@dataclass(frozen=True)
class Agreement:
    """How often a quantised engine predicts the reference's next token of one prompt."""

    prompt: str
    num_prompt_tokens: int
    num_tokens: int
    num_equal_predictions: int


@console.reports_errors
def verify(
    engine: Annotated[Path, typer.Argument(help="Engine folder.")],
    model: Annotated[str, typer.Option(help="The checkpoint that the engine was built from.")],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A prompt; repeat it for more.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to compare per prompt.")] = 32,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest difference of a logit that passes.")
    ] = 1e-3,
    agreement: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Least share of equal predictions, for a quantised engine."
        ),
    ] = 0.85,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare an engine with its checkpoint; exit with 1 where they differ."""
    from octavo.tools.greedy import GreedyDecoder
    from octavo.tools.sample_prompts import tokenized

    with GreedyDecoder(engine) as decoder:
        manifest = decoder.manifest
        prompts = tokenized(engine, manifest, manifest.limits.max_model_len - max_tokens, prompt)
        ours = [decoder.decode(ids, max_tokens) for ids in prompts.values()]
        theirs = _references(model, manifest.spec, list(prompts.values()), max_tokens)
        if manifest.quantization == "none" and manifest.kv_cache_dtype != "int8":
            passed = _verify_equality(prompts, ours, theirs, tolerance, as_json)
        else:
            predicted = [
                decoder.predict(ids, reference.token_ids)
                for ids, reference in zip(prompts.values(), theirs, strict=True)
            ]
            passed = _verify_agreement(prompts, predicted, theirs, agreement, as_json)
    if not passed:
        raise typer.Exit(1)


def _verify_equality(
    prompts: dict[str, list[int]],
    ours: list[Continuation],
    theirs: list[Reference],
    tolerance: float,
    as_json: bool,
) -> bool:
    rows = [
        _compare(text, len(ids), ours[i], theirs[i], tolerance)
        for i, (text, ids) in enumerate(prompts.items())
    ]
    passed = all(row.passed for row in rows)
    if as_json:
        results = [_as_json(row) for row in rows]
        console.print_json({"passed": passed, "tolerance": tolerance, "prompts": results})
    else:
        _print(rows, tolerance)
    return passed


def _verify_agreement(
    prompts: dict[str, list[int]],
    predicted: list[list[int]],
    theirs: list[Reference],
    least: float,
    as_json: bool,
) -> bool:
    rows = []
    for (text, ids), mine, reference in zip(prompts.items(), predicted, theirs, strict=True):
        equal = sum(a == b for a, b in zip(mine, reference.token_ids, strict=True))
        rows.append(Agreement(text, len(ids), len(mine), equal))
    share = sum(row.num_equal_predictions for row in rows) / sum(row.num_tokens for row in rows)
    passed = share >= least
    if as_json:
        results = [dataclasses.asdict(row) for row in rows]
        report = {"passed": passed, "agreement": share, "least": least, "prompts": results}
        console.print_json(report)
    else:
        _print_agreement(rows, share, least)
    return passed


def _references(
    model: str, spec: ModelSpec, prompts: list[list[int]], max_tokens: int
) -> list[Reference]:
    import torch
    from transformers import GenerationConfig

    from octavo.compiler.checkpoints import open_checkpoint

    # generate() warns of settings that greedy decoding does not use.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    reference: Any = open_checkpoint(model).load_model(torch.float32)
    eos = list(spec.eos_token_ids) or None
    make_config: Any = GenerationConfig  # untyped
    config = make_config(
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=eos,
        pad_token_id=eos[0] if eos else 0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    results = []
    for ids in prompts:
        rows = torch.tensor([ids])
        with torch.inference_mode():
            output = reference.generate(
                rows, attention_mask=torch.ones_like(rows), generation_config=config
            )
        logits = torch.cat(output.logits).float().numpy()
        results.append(Reference(tuple(output.sequences[0, len(ids) :].tolist()), logits))
    return results


def _compare(
    prompt: str,
    num_prompt_tokens: int,
    ours: Continuation,
    theirs: Reference,
    tolerance: float,
) -> Comparison:
    difference = float(np.abs(ours.logits[0] - theirs.logits[0]).max())
    length = max(len(ours.token_ids), len(theirs.token_ids))
    equal = 0
    for mine, other in zip(ours.token_ids, theirs.token_ids, strict=False):
        if mine != other:
            break
        equal += 1
    divergence = equal if equal < length else None
    tie = False
    if divergence is not None and divergence < len(theirs.logits):
        second, best = np.partition(theirs.logits[divergence], -2)[-2:]
        tie = bool(best - second <= TIE)
    return Comparison(
        prompt=prompt,
        num_prompt_tokens=num_prompt_tokens,
        max_logit_difference=difference,
        num_tokens=length,
        num_equal_tokens=equal,
        first_divergence=divergence,
        is_tie=tie,
        # A NaN compares false with everything, so it fails here.
        passed=difference <= tolerance and (divergence is None or tie),
    )


def _as_json(row: Comparison) -> dict[str, Any]:
    difference = row.max_logit_difference
    finite = difference if math.isfinite(difference) else None
    return {**dataclasses.asdict(row), "max_logit_difference": finite}


def _print(rows: list[Comparison], tolerance: float) -> None:
    table = console.table(
        f"against the checkpoint in float32, logits within {tolerance:g}",
        "prompt", "tokens>", "max logit difference>", "equal tokens>", "first divergence", "result",
    )  # fmt: skip
    for row in rows:
        where = "none"
        if row.first_divergence is not None:
            where = f"token {row.first_divergence}" + (" (a tie)" if row.is_tie else "")
        table.add_row(
            console.one_line(row.prompt),
            str(row.num_prompt_tokens),
            f"{row.max_logit_difference:.2e}",
            f"{row.num_equal_tokens} of {row.num_tokens}",
            where,
            "equal" if row.passed else "DIFFERENT",
        )
    console.print_tables(table)


def _print_agreement(rows: list[Agreement], share: float, least: float) -> None:
    table = console.table(
        "predictions of the quantised engine, against the checkpoint in float32",
        "prompt", "tokens>", "equal predictions>",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            console.one_line(row.prompt),
            str(row.num_prompt_tokens),
            f"{row.num_equal_predictions} of {row.num_tokens}",
        )
    console.print_tables(table)
    result = "enough" if share >= least else "TOO FEW"
    typer.echo(f"{share:.1%} of the predictions are equal, {result} for {least:.0%}")
