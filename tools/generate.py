"""`octavo generate`: completes prompts with an engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.tools import completions, options, speculative_options, structured_options
from octavo.tools.console import print_json, reports_errors, usage_error

if TYPE_CHECKING:
    from octavo.runtime import LLM, RequestOutput, SamplingParams
    from octavo.runtime.prompts import Prompt
    from octavo.runtime.sampling.beam_search import BeamSearchParams


@reports_errors
def generate(
    engine: options.EngineArgument,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            "-p",
            help="A prompt; repeat it for more.",
            rich_help_panel=options.PROMPTS,
        ),
    ] = None,
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A UTF-8 file whose whole text is one prompt; repeatable.",
            rich_help_panel=options.PROMPTS,
        ),
    ] = None,
    token_ids: Annotated[
        list[str] | None,
        typer.Option(
            help="A prompt as token ids, such as 1,15,7; repeatable, needs no tokenizer.",
            rich_help_panel=options.PROMPTS,
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Put each prompt through the model's chat template.",
            rich_help_panel=options.PROMPTS,
        ),
    ] = False,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: Annotated[
        float | None,
        typer.Option(
            help="Lowers the logits of tokens in the output by this.",
            rich_help_panel=options.SAMPLING,
        ),
    ] = None,
    frequency_penalty: Annotated[
        float | None,
        typer.Option(
            help="Lowers them by this for each time they are in the output.",
            rich_help_panel=options.SAMPLING,
        ),
    ] = None,
    seed: options.Seed = None,
    n: Annotated[
        int,
        typer.Option(help="Completions of each prompt.", rich_help_panel=options.SAMPLING),
    ] = 1,
    best_of: Annotated[
        int | None,
        typer.Option(
            help="Generate this many completions and show the n likeliest.",
            rich_help_panel=options.SAMPLING,
        ),
    ] = None,
    beam_width: Annotated[
        int | None,
        typer.Option(
            help="Search with this many beams instead of sampling.",
            rich_help_panel=options.SAMPLING,
        ),
    ] = None,
    length_penalty: Annotated[
        float | None,
        typer.Option(
            help="Of a beam search: above 0 favours long results, below 0 short ones."
            "  [default: 1]",
            rich_help_panel=options.SAMPLING,
        ),
    ] = None,
    max_tokens: Annotated[
        int,
        typer.Option(help="Tokens to generate at most.", rich_help_panel=options.STOPPING),
    ] = 128,
    min_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens to generate before anything may end the output.",
            rich_help_panel=options.STOPPING,
        ),
    ] = None,
    stop: options.Stop = None,
    stop_token_id: Annotated[
        list[int] | None,
        typer.Option(
            help="A token id that ends the output; repeatable.", rich_help_panel=options.STOPPING
        ),
    ] = None,
    json_schema: structured_options.JsonSchema = None,
    regex: structured_options.Regex = None,
    choice: structured_options.Choice = None,
    stream: Annotated[
        bool,
        typer.Option("--stream", help="Print text as it comes.", rich_help_panel=options.OUTPUT),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print a JSON list with an entry for each prompt.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="In the JSON: log-probabilities of each token and of this many likeliest ones.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    kv_cache_memory: options.KVCacheMemory = options.DEFAULT_KV_CACHE_MEMORY,
    num_threads: options.NumThreads = None,
    speculative: speculative_options.ServeOption = None,
) -> None:
    """Complete prompts with an engine and print the text."""
    if stream and as_json:
        raise usage_error("--stream prints text as it comes, --json all at once: choose one")
    if stream and (n > 1 or (best_of or 1) > 1 or beam_width is not None):
        raise usage_error(
            "--stream shows one completion as it comes: leave out --n, --best-of and --beam-width"
        )
    if logprobs is not None and not as_json:
        raise usage_error("--logprobs are part of the JSON: add --json")
    texts = [*(prompt or ()), *(_read_prompt(path) for path in prompt_file or ())]
    ids = [_parse_token_ids(text) for text in token_ids or ()]
    if not texts and not ids:
        raise usage_error("no prompt: give --prompt, --prompt-file or --token-ids")
    if chat and ids:
        raise usage_error("--chat needs text: it cannot be used with --token-ids")
    # What a beam search has no use for.
    sampling: dict[str, Any] = options.given(
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        best_of=best_of,
        min_tokens=min_tokens,
        stop=stop,
        logprobs=logprobs,
        structured_outputs=structured_options.given(json_schema, regex, choice),
    )
    common = {
        "n": n,
        "temperature": temperature,
        "max_tokens": max_tokens,
        "stop_token_ids": stop_token_id or (),
    }

    from octavo.runtime import LLM

    params = _params(beam_width, length_penalty, common, sampling)
    with LLM(
        engine,
        kv_cache_memory=kv_cache_memory,
        num_threads=num_threads,
        speculative=speculative_options.drafters_to_use(speculative),
    ) as llm:
        prompts: list[Prompt] = [_as_chat(llm, text) if chat else text for text in texts]
        prompts += [{"prompt_token_ids": row} for row in ids]
        if stream:
            for one in prompts:
                completions.print_stream(llm, one, params)
            return
        results = _run(llm, prompts, params)
        if as_json:
            print_json([completions.as_json(result) for result in results])
        else:
            completions.print_results(llm, results)


def _params(
    beam_width: int | None,
    length_penalty: float | None,
    common: dict[str, Any],
    sampling: dict[str, Any],
) -> SamplingParams | BeamSearchParams:
    from octavo.runtime import SamplingParams
    from octavo.runtime.sampling.beam_search import BeamSearchParams

    if beam_width is None:
        if length_penalty is not None:
            raise usage_error("--length-penalty is for a beam search: add --beam-width")
        return SamplingParams(**common, **sampling)
    if sampling:
        if sampling.pop("structured_outputs", None) is not None:
            raise usage_error(
                "a beam search takes no structured output: leave out --json-schema, --regex and "
                "--choice, or --beam-width"
            )
        names = ", ".join("--" + name.replace("_", "-") for name in sampling)
        raise usage_error(f"a beam search does not sample: leave out {names}, or --beam-width")
    search: dict[str, Any] = options.given(length_penalty=length_penalty)
    return BeamSearchParams(beam_width=beam_width, **common, **search)


def _run(
    llm: LLM, prompts: list[Prompt], params: SamplingParams | BeamSearchParams
) -> list[RequestOutput]:
    from octavo.runtime.sampling.beam_search import BeamSearchParams

    if isinstance(params, BeamSearchParams):
        return llm.beam_search(prompts, params)
    return llm.generate(prompts, params)


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


def _as_chat(llm: LLM, text: str) -> Prompt:
    return llm.chat_prompt([{"role": "user", "content": text}])
