"""What clients send, as OpenAI defines it, with vLLM's names for what OpenAI lacks.

A field that is not here is refused: nothing that a client asks for is passed over. The few that
cannot change an answer are named in `WithoutEffect`. Ranges are `SamplingParams`' to check.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

# More than any use needs, and few enough to look for in every piece of text.
_MOST_STOPS = 64
_MOST_WORDS = 1024

Message = dict[str, Any]
TokenIds = list[Annotated[int, Field(ge=0, lt=1 << 31)]]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class StreamOptions(_Strict):
    include_usage: bool = False  # a last chunk without choices says what was used
    continuous_usage_stats: bool = False  # every chunk says what was used up to it
    include_obfuscation: bool = False  # OpenAI's padding against eavesdroppers: without effect


class WithoutEffect(_Strict):
    """Bookkeeping that OpenAI's clients may send."""

    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    user: str | None = None


class GenerationRequest(WithoutEffect):
    """What both kinds of completions take. See `SamplingParams` for what is not OpenAI's."""

    model: str
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: str | Annotated[list[str], Field(max_length=_MOST_STOPS)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=_MOST_WORDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: Annotated[list[str], Field(max_length=_MOST_WORDS)] | None = None
    allowed_token_ids: TokenIds | None = None
    skip_special_tokens: bool | None = None
    speculate: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: int = 0
    cache_salt: str | None = None
    return_token_ids: bool | None = None


class CompletionRequest(GenerationRequest):
    prompt: str | list[str] | TokenIds | list[TokenIds]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    add_special_tokens: bool = True


class FunctionDefinition(_Strict):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(_Strict):
    name: str


class NamedToolChoice(_Strict):
    type: Literal["function"]
    function: FunctionName


class JsonSchemaFormat(_Strict):
    name: str
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class ChatRequest(GenerationRequest):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(_Strict):
    """Either a prompt or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(_Strict):
    model: str | None = None
    tokens: TokenIds
