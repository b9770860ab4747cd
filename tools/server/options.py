"""What a server is told beside the options of its engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ToolCallFormatName = Literal["auto", "hermes", "mistral", "llama3_json"]


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Nothing here reaches the engine.

    model_names       names that requests may give the model; answers bear the first
    api_keys          bearer tokens of which requests need one; none: everybody is served
    rate_limit        requests of one API key, or one address, such as "60/minute"; None: any
    max_body_bytes    the longest body of a request
    body_timeout      seconds that a body may take to arrive
    max_choices       most completions of one request: its prompts times `n`
    max_logprobs      most log-probabilities with each token
    cors_origins      origins whose pages may call the server; none: no other page may
    drain_timeout     seconds for which open requests may go on once the server is to end
    tool_call_format  how the model writes tool calls; "auto": as its chat template shows
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    rate_limit: str | None = None
    max_body_bytes: int = 4 << 20
    body_timeout: float = 60.0
    max_choices: int = 128
    max_logprobs: int = 20
    cors_origins: tuple[str, ...] = ()
    drain_timeout: float = 30.0
    tool_call_format: ToolCallFormatName = "auto"
