"""/v1/completions: prompts, as texts or token ids, and what follows them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.responses import Response

from octavo.runtime.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from octavo.runtime.sampling.sampling_params import SamplingParams
from octavo.tools.server import sampling
from octavo.tools.server.errors import ApiError
from octavo.tools.server.logprobs import CompletionLogprobsWriter, joined
from octavo.tools.server.replies import EventStream, JsonReply
from octavo.tools.server.requests import CompletionRequest
from octavo.tools.server.responses import Completion, CompletionChoice, CompletionLogprobs
from octavo.tools.server.service import Service
from octavo.tools.server.usage import UsageCount


async def complete(service: Service, request: CompletionRequest) -> Response:
    """Errors of the request itself are raised, the engine's are the answer's."""
    call = await _read(service, request)
    return EventStream(_chunks(call)) if request.stream else JsonReply(_whole(call))


@dataclass
class _Call:
    """A checked request. `echo`: the texts of the prompts, where the client wants them back."""

    service: Service
    request: CompletionRequest
    prompts: list[dict[str, Any]]
    params: SamplingParams
    echo: list[str] | None
    head: dict[str, Any]
    usage: UsageCount = field(default_factory=UsageCount)
    prompt_logprobs: dict[int, list[PositionLogprobs | None]] = field(default_factory=dict)

    @property
    def prompts_only(self) -> bool:
        """The engine computes a token at least; who wants none does not get it."""
        return self.request.max_tokens == 0

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        outputs = self.service.generate(self.prompts, self.params, self.request.priority)
        async with aclosing(outputs) as news:
            async for prompt_index, output in news:
                self.usage.add(prompt_index, output, generated=not self.prompts_only)
                if output.prompt_logprobs is not None:
                    self.prompt_logprobs[prompt_index] = output.prompt_logprobs
                yield prompt_index, output


async def _read(service: Service, request: CompletionRequest) -> _Call:
    service.check_available()
    service.check_model(request.model)
    sampling.check_stream_options(request)
    sampling.check_logprobs("logprobs", request.logprobs, service.options.max_logprobs)
    prompts = await _prompts(service, request)
    options: dict[str, Any] = {"logprobs": request.logprobs, "best_of": request.best_of}
    if request.max_tokens is not None:
        options["max_tokens"] = request.max_tokens or 1
    if request.echo:
        options["prompt_logprobs"] = request.logprobs
    params = sampling.sampling_params(request, **options)
    sampling.check_choices(len(prompts), params, service.options.max_choices)
    return _Call(
        service,
        request,
        prompts,
        params,
        echo=await _echo(service, prompts) if request.echo else None,
        head={**service.head("cmpl"), "object": "text_completion"},
    )


async def _prompts(service: Service, request: CompletionRequest) -> list[dict[str, Any]]:
    given = request.prompt
    if isinstance(given, list) and not given:
        raise ApiError(400, "the prompt is empty: give at least one token", param="prompt")
    several = isinstance(given, list) and not isinstance(given[0], int)
    prompts = []
    for prompt in cast("list[str | list[int]]", given if several else [given]):
        salt = {} if request.cache_salt is None else {"cache_salt": request.cache_salt}
        if isinstance(prompt, str):
            special = request.add_special_tokens
            ids = await service.encode(prompt, add_special_tokens=special) if prompt else []
            prompts.append({"prompt": prompt, "prompt_token_ids": ids, **salt})
        else:
            prompts.append({"prompt_token_ids": prompt, **salt})
    return prompts


async def _echo(service: Service, prompts: list[dict[str, Any]]) -> list[str]:
    return [
        prompt["prompt"]
        if "prompt" in prompt
        else await service.decode(prompt["prompt_token_ids"], skip_special_tokens=True)
        for prompt in prompts
    ]


async def _whole(call: _Call) -> Completion:
    choices: list[CompletionChoice] = []
    async with aclosing(call.outputs()) as outputs:
        async for prompt_index, output in outputs:
            for completion in output.outputs:
                writer = _ChoiceWriter(call, prompt_index, completion.index)
                choices.append(writer.write(output, completion))
    choices.sort(key=lambda choice: choice["index"])
    answer: dict[str, Any] = {**call.head, "choices": choices, "usage": call.usage.total()}
    return cast("Completion", answer)


async def _chunks(call: _Call) -> AsyncGenerator[dict[str, Any], None]:
    writers: dict[tuple[int, int], _ChoiceWriter] = {}
    async with aclosing(call.outputs()) as outputs:
        async for prompt_index, output in outputs:
            for choice in _news(call, prompt_index, output, writers):
                yield {**call.head, "choices": [choice], **call.usage.of_chunk(call.request)}
    options = call.request.stream_options
    if options is not None and options.include_usage:
        yield {**call.head, "choices": [], "usage": call.usage.total()}


def _news(
    call: _Call,
    prompt_index: int,
    output: RequestOutput,
    writers: dict[tuple[int, int], _ChoiceWriter],
) -> Iterator[CompletionChoice]:
    for completion in output.outputs:
        key = prompt_index, completion.index
        if key not in writers:
            writers[key] = _ChoiceWriter(call, *key)
        choice = writers[key].write(output, completion)
        # A token that is only a part of a character has no text yet.
        if choice["text"] or choice["finish_reason"] or choice["logprobs"] or "token_ids" in choice:
            yield choice


class _ChoiceWriter:
    """One choice, whole or piece by piece."""

    def __init__(self, call: _Call, prompt_index: int, index: int) -> None:
        self._call = call
        self._prompt_index = prompt_index
        self._index = prompt_index * call.params.n + index
        self._begun = False
        self._logprobs: CompletionLogprobsWriter | None = None
        if call.request.logprobs is not None:
            self._logprobs = CompletionLogprobsWriter(
                call.service.tokenizer,
                call.request.logprobs,
                skip_special_tokens=call.params.skip_special_tokens,
            )

    def write(self, output: RequestOutput, completion: CompletionOutput) -> CompletionChoice:
        text, logprobs = self._prompt(output)
        begun, self._begun = self._begun, True
        if not self._call.prompts_only:
            text += completion.text
            if self._logprobs is not None and completion.logprobs is not None:
                new = self._logprobs.write(completion.token_ids, completion.logprobs)
                logprobs = new if logprobs is None else joined([logprobs, new])
        choice: CompletionChoice = {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self._call.prompts_only:
            choice["finish_reason"] = completion.finish_reason and "length"
            choice["stop_reason"] = None
        if self._call.request.return_token_ids:
            choice["token_ids"] = [] if self._call.prompts_only else completion.token_ids
            if not begun:
                choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _prompt(self, output: RequestOutput) -> tuple[str, CompletionLogprobs | None]:
        """What the choice begins with, once, if it is to begin with the prompt."""
        if self._begun or self._call.echo is None:
            return "", None
        text = self._call.echo[self._prompt_index]
        if self._logprobs is None:
            return text, None
        positions = self._call.prompt_logprobs[self._prompt_index]
        return text, self._logprobs.write_prompt(text, output.prompt_token_ids, positions)
