"""`octavo generate`: completes prompts with an engine."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.graphs.errors import RequestError
from octavo.tools.console import print_json, reports_errors, usage_error

if TYPE_CHECKING:
    from octavo.runtime import LLM, RequestOutput, SamplingParams
    from octavo.runtime.prompts import Prompt


@reports_errors
def generate(
    engine: Annotated[str, typer.Argument(help="Engine folder, or a checkpoint to build first.")],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A prompt; repeat it for more.")
    ] = None,
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A UTF-8 file whose whole text is one prompt; repeatable.",
        ),
    ] = None,
    token_ids: Annotated[
        list[str] | None,
        typer.Option(help="A prompt as token ids, such as 1,15,7; repeatable, needs no tokenizer."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put each prompt through the model's chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from this much of the probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many tokens; 0: from all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it comes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of results.")] = False,
    num_threads: Annotated[int | None, typer.Option(min=1, help="Default: all cores.")] = None,
) -> None:
    """Complete prompts with an engine and print the text."""
    if stream and as_json:
        raise usage_error("--stream prints text as it comes, --json all at once: choose one")
    texts = [*(prompt or ()), *(_read_prompt(path) for path in prompt_file or ())]
    ids = [_parse_token_ids(text) for text in token_ids or ()]
    if not texts and not ids:
        raise usage_error("no prompt: give --prompt, --prompt-file or --token-ids")
    if chat and ids:
        raise usage_error("--chat needs text: it cannot be used with --token-ids")

    from octavo.runtime import LLM, SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
    )
    with LLM(engine, num_threads=num_threads) as llm:
        prompts: list[Prompt] = [_as_chat(llm, text) if chat else text for text in texts]
        prompts += [{"prompt_token_ids": row} for row in ids]
        if stream:
            for one in prompts:
                _print_stream(llm, one, params)
            return
        results = llm.generate(prompts, params)
        if as_json:
            print_json([_as_json(result) for result in results])
        else:
            shown = _shown_as(llm)
            for result in results:
                typer.echo(shown(result))


def _read_prompt(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise usage_error(f"{path} is not UTF-8 text ({error.reason})") from None


def _parse_token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise usage_error(
            f"--token-ids takes integers with commas between them, not {text!r}"
        ) from None


def _as_chat(llm: LLM, text: str) -> str:
    messages = [{"role": "user", "content": text}]
    return llm.apply_chat_template(messages, add_generation_prompt=True)


def _shown_as(llm: LLM) -> Callable[[RequestOutput], str]:
    """What to print of an output: its text, or token ids where there is no tokenizer."""
    try:
        llm.get_tokenizer()
    except RequestError:
        return lambda result: ",".join(map(str, result.outputs[0].token_ids))
    return lambda result: result.text


def _print_stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> None:
    shown, printed, last = _shown_as(llm), "", None
    for last in llm.stream(prompt, params):
        text = shown(last)
        sys.stdout.write(text[len(printed) :])
        sys.stdout.flush()
        printed = text
    sys.stdout.write("\n")
    if last is not None and sys.stderr.isatty():
        typer.secho(_summary(last), err=True, dim=True)


def _summary(result: RequestOutput) -> str:
    metrics = result.metrics
    parts = [f"{len(result.outputs[0].token_ids)} tokens"]
    if metrics.time_to_first_token is not None:
        parts.append(f"the first after {metrics.time_to_first_token * 1e3:.0f} ms")
    if metrics.time_per_output_token:
        parts.append(f"then {1 / metrics.time_per_output_token:.0f} a second")
    return ", ".join(parts)


def _as_json(result: RequestOutput) -> dict[str, Any]:
    completion = result.outputs[0]
    return {
        "prompt": result.prompt,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "num_cached_tokens": result.num_cached_tokens,
        "metrics": dataclasses.asdict(result.metrics),
    }
