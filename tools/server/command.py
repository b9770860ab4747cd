"""`octavo serve`: an engine behind OpenAI's HTTP interface."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from octavo.graphs.errors import OctavoError
from octavo.tools import options, speculative_options
from octavo.tools.console import reports_errors

SERVER = "Server"
LIMITS = "Limits"
SECURITY = "Security"
KEYS_VARIABLE = "OCTAVO_API_KEYS"


@reports_errors
def serve(
    engine: options.EngineArgument,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0: all.", rich_help_panel=SERVER)
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="0 takes a free one.", rich_help_panel=SERVER),
    ] = 8000,
    model_name: Annotated[
        list[str] | None,
        typer.Option(
            "--model-name",
            help="Name that requests give the model; repeatable.  [default: the engine's folder]",
            rich_help_panel=SERVER,
        ),
    ] = None,
    tool_call_format: Annotated[
        Literal["auto", "hermes", "mistral", "llama3_json"],
        typer.Option(
            help="How the model writes tool calls; auto: as its chat template shows.",
            rich_help_panel=SERVER,
        ),
    ] = "auto",
    drain_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds for which open requests may go on after SIGTERM.",
            rich_help_panel=SERVER,
        ),
    ] = 30.0,
    log_level: Annotated[
        Literal["error", "warning", "info", "debug"],
        typer.Option(help="What is logged to stderr.", rich_help_panel=SERVER),
    ] = "info",
    access_log: Annotated[
        bool, typer.Option(help="Whether each request is logged.", rich_help_panel=SERVER)
    ] = True,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A key that requests must bring; repeatable. {KEYS_VARIABLE} holds some too, "
            "with commas between them, and unlike this option shows them to nobody else.",
            rich_help_panel=SECURITY,
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="An origin whose pages may call the server; repeatable.  [default: none]",
            rich_help_panel=SECURITY,
        ),
    ] = None,
    ssl_keyfile: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Key of the certificate.", rich_help_panel=SECURITY
        ),
    ] = None,
    ssl_certfile: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Certificate, for HTTPS.", rich_help_panel=SECURITY
        ),
    ] = None,
    max_open_requests: Annotated[
        int,
        typer.Option(
            min=1,
            help="Prompts that run or wait; one more is refused with 429.",
            rich_help_panel=LIMITS,
        ),
    ] = 256,
    rate_limit: Annotated[
        str | None,
        typer.Option(
            help="Requests of one key, or one address, such as 60/minute.  [default: any]",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    max_body_size: Annotated[
        str, typer.Option(help="The longest request.", rich_help_panel=LIMITS)
    ] = "4MiB",
    max_choices: Annotated[
        int,
        typer.Option(
            min=1, help="Completions of one request: prompts times n.", rich_help_panel=LIMITS
        ),
    ] = 128,
    max_logprobs: Annotated[
        int,
        typer.Option(min=0, help="Log-probabilities with each token.", rich_help_panel=LIMITS),
    ] = 20,
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        typer.Option(
            help="Requests in the order of their arrival, or of their priority.",
            rich_help_panel=options.ENGINE,
        ),
    ] = "fcfs",
    prefix_caching: Annotated[
        bool,
        typer.Option(
            help="Whether computed prefixes are kept for later prompts.",
            rich_help_panel=options.ENGINE,
        ),
    ] = True,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Sequences of one step.  [default: the engine's most]",
            rich_help_panel=options.ENGINE,
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of one step.  [default: the engine's most]",
            rich_help_panel=options.ENGINE,
        ),
    ] = None,
    kv_cache_memory: options.KVCacheMemory = options.DEFAULT_KV_CACHE_MEMORY,
    num_threads: options.NumThreads = None,
    speculative: speculative_options.ServeOption = None,
) -> None:
    """Serve an engine behind OpenAI's HTTP interface, with a page for browsers at /.

    SIGTERM or Ctrl-C lets open requests end, a second one does not.
    """
    try:
        from octavo.tools.server import serving
    except ModuleNotFoundError as error:
        raise OctavoError(
            f"the server needs {error.name}, which is not installed: install `octavo[serve]`"
        ) from None
    from octavo.runtime.async_llm import AsyncLLM
    from octavo.runtime.capacity import parse_memory
    from octavo.tools.server.options import ServerOptions
    from octavo.tools.server.service import Service

    given: dict[str, Any] = options.given(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_threads=num_threads,
    )
    llm = AsyncLLM(
        engine,
        max_open_requests=max_open_requests,
        scheduling_policy=scheduling_policy,
        enable_prefix_caching=prefix_caching,
        kv_cache_memory=kv_cache_memory,
        speculative=speculative_options.drafters_to_use(speculative),
        **given,
    )
    server_options = ServerOptions(
        model_names=tuple(model_name or [Path(engine).resolve().name]),
        api_keys=(*(api_key or ()), *_keys_of_environment()),
        rate_limit=rate_limit,
        max_body_bytes=parse_memory(max_body_size, "max_body_size"),
        max_choices=max_choices,
        max_logprobs=max_logprobs,
        cors_origins=tuple(cors_origin or ()),
        drain_timeout=drain_timeout,
        tool_call_format=tool_call_format,
    )
    serving.run(
        Service(llm, server_options),
        host,
        port,
        log_level=log_level,
        access_log=access_log,
        ssl_keyfile=ssl_keyfile,
        ssl_certfile=ssl_certfile,
    )


def _keys_of_environment() -> list[str]:
    return [key for key in os.environ.get(KEYS_VARIABLE, "").split(",") if key]
