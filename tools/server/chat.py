"""/v1/chat/completions: a conversation and its next message, which may be tool calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.responses import Response

from octavo.runtime.outputs import CompletionOutput
from octavo.runtime.sampling.sampling_params import SamplingParams
from octavo.tools.server import sampling
from octavo.tools.server.chat_output import OutputRules, output_rules
from octavo.tools.server.errors import ApiError
from octavo.tools.server.logprobs import chat_logprobs
from octavo.tools.server.replies import EventStream, JsonReply
from octavo.tools.server.requests import ChatRequest
from octavo.tools.server.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ToolCall,
)
from octavo.tools.server.service import Service
from octavo.tools.server.usage import UsageCount


async def chat(service: Service, request: ChatRequest) -> Response:
    """Errors of the request itself are raised, the engine's are the answer's."""
    call = await _read(service, request)
    return EventStream(_chunks(call)) if request.stream else JsonReply(_whole(call))


@dataclass
class _Call:
    """A checked request."""

    service: Service
    request: ChatRequest
    prompt: dict[str, Any]
    params: SamplingParams
    rules: OutputRules
    head: dict[str, Any]
    usage: UsageCount = field(default_factory=UsageCount)

    def logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if completion.logprobs is None:
            return None
        num_top = self.request.top_logprobs or 0
        return chat_logprobs(
            self.service.tokenizer, completion.token_ids, completion.logprobs, num_top
        )


async def _read(service: Service, request: ChatRequest) -> _Call:
    service.check_available()
    service.check_model(request.model)
    sampling.check_stream_options(request)
    sampling.check_logprobs("top_logprobs", request.top_logprobs, service.options.max_logprobs)
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(
            400,
            "top_logprobs is given and logprobs is not true: set logprobs to true or leave it out",
            param="top_logprobs",
        )
    rules = output_rules(service, request)
    # By default an answer may fill the context.
    most = request.max_completion_tokens
    if most is None:
        most = request.max_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    params = sampling.sampling_params(
        request, max_tokens=most, logprobs=logprobs, **rules.sampling_options
    )
    sampling.check_choices(1, params, service.options.max_choices)
    prompt = await service.chat_prompt(
        request.messages,
        _template_variables(request),
        tools=rules.tools,
        documents=request.documents,
        add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
        continue_final_message=request.continue_final_message,
    )
    if request.cache_salt is not None:
        prompt["cache_salt"] = request.cache_salt
    return _Call(service, request, prompt, params, rules, service.head("chatcmpl"))


def _template_variables(request: ChatRequest) -> dict[str, Any]:
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    return variables


async def _whole(call: _Call) -> ChatCompletion:
    choices: list[ChatChoice] = []
    answer: dict[str, Any] = {**call.head, "object": "chat.completion", "choices": choices}
    outputs = call.service.generate([call.prompt], call.params, call.request.priority)
    async with aclosing(outputs) as news:
        async for index, output in news:
            call.usage.add(index, output)
            choices += [_choice(call, completion) for completion in output.outputs]
            if call.request.return_token_ids:
                answer["prompt_token_ids"] = output.prompt_token_ids
    answer["usage"] = call.usage.total()
    return cast("ChatCompletion", answer)


def _choice(call: _Call, completion: CompletionOutput) -> ChatChoice:
    reader = call.rules.reader()
    deltas = [*reader.push(completion.text), *reader.finish()]
    choice: ChatChoice = {
        "index": completion.index,
        "message": _message(deltas),
        "logprobs": call.logprobs(completion),
        "finish_reason": reader.finish_reason(completion.finish_reason),
        "stop_reason": completion.stop_reason,
    }
    if call.request.return_token_ids:
        choice["token_ids"] = completion.token_ids
    return choice


def _message(deltas: list[ChatDelta]) -> ChatMessage:
    """The sum of all deltas."""
    texts = [delta["content"] for delta in deltas if "content" in delta]
    calls = [
        cast("ToolCall", {key: value for key, value in call.items() if key != "index"})
        for delta in deltas
        for call in delta.get("tool_calls", ())
    ]
    content = None if calls and not texts else "".join(texts)
    message: ChatMessage = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message["tool_calls"] = calls
    return message


async def _chunks(call: _Call) -> AsyncGenerator[dict[str, Any], None]:
    head = {**call.head, "object": "chat.completion.chunk"}
    writers = [_ChoiceWriter(call, index) for index in range(call.params.n)]
    begun = False
    outputs = call.service.generate([call.prompt], call.params, call.request.priority)
    async with aclosing(outputs) as news:
        async for index, output in news:
            if not begun:
                begun = True
                first: dict[str, Any] = {**head, **call.usage.of_chunk(call.request)}
                if call.request.return_token_ids:
                    first["prompt_token_ids"] = output.prompt_token_ids
                for writer in writers:
                    yield {**first, "choices": [writer.role()]}
            call.usage.add(index, output)
            for completion in output.outputs:
                for choice in writers[completion.index].write(completion):
                    yield {**head, "choices": [choice], **call.usage.of_chunk(call.request)}
    options = call.request.stream_options
    if options is not None and options.include_usage:
        yield {**head, "choices": [], "usage": call.usage.total()}


class _ChoiceWriter:
    """One choice of a stream."""

    def __init__(self, call: _Call, index: int) -> None:
        self._call = call
        self._index = index
        self._reader = call.rules.reader()

    def role(self) -> ChatChunkChoice:
        """Every choice begins with it."""
        return self._chunk({"role": "assistant", "content": ""})

    def write(self, completion: CompletionOutput) -> Iterator[ChatChunkChoice]:
        """A chunk for each new delta; the last one has the reason why the choice ended."""
        deltas = list(self._reader.push(completion.text))
        if completion.finished:
            deltas += self._reader.finish()
        logprobs = self._call.logprobs(completion)
        wants_ids = bool(self._call.request.return_token_ids)
        if not deltas and (completion.finished or logprobs is not None or wants_ids):
            deltas = [{}]
        for number, delta in enumerate(deltas, start=1):
            chunk = self._chunk(delta)
            if number == 1:
                chunk["logprobs"] = logprobs
                if wants_ids:
                    chunk["token_ids"] = completion.token_ids
            if number == len(deltas) and completion.finished:
                chunk["finish_reason"] = self._reader.finish_reason(completion.finish_reason)
                chunk["stop_reason"] = completion.stop_reason
            yield chunk

    def _chunk(self, delta: ChatDelta) -> ChatChunkChoice:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}
