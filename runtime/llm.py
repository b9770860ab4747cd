"""The public entry: an engine, a list of prompts, their texts."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast

from octavo.graphs.errors import RequestError
from octavo.runtime.engine import Engine
from octavo.runtime.generation import Generation
from octavo.runtime.llm_engine import EngineOptions, LLMEngine
from octavo.runtime.outputs import RequestOutput
from octavo.runtime.prompts import Prompt
from octavo.runtime.sampling.beam_search import BeamSearchParams
from octavo.runtime.sampling.sampling_params import RequestOutputKind, SamplingParams
from octavo.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.runtime.cache.prefix_cache import PinnedPrefix
    from octavo.runtime.metrics.snapshots import Snapshot

Message = Mapping[str, Any]
_Params = TypeVar("_Params", SamplingParams, BeamSearchParams)


class LLM:
    """Generates text with an engine. Not thread-safe; a context manager that frees the engine.

    `engine_or_checkpoint` and the options are those of `LLMEngine`; it raises as that does.
    """

    def __init__(self, engine_or_checkpoint: str | Path, **options: Unpack[EngineOptions]) -> None:
        self._llm_engine = LLMEngine(engine_or_checkpoint, **options)
        self._request_ids = itertools.count()
        # Outputs of requests whose stream was not looking when a step brought them.
        self._outputs: defaultdict[str, list[RequestOutput]] = defaultdict(list)

    @property
    def engine(self) -> Engine:
        return self._llm_engine.engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Completes every prompt, batched together; outputs come in the order of the prompts.

        A prompt is a text, {"prompt": text} or {"prompt_token_ids": [...]}, with "cache_salt" if
        its cached prefix is to be its own. One SamplingParams serves all prompts, a list gives
        each its own, None takes the defaults; so does a priority (see `SchedulingOptions`).

        RequestError, CapacityError or QueueFullError if a prompt is refused: then none is started.
        If one fails alone (its own logits processor raised) its error is raised.
        """
        prompts = _as_list(prompts)
        if sampling_params is None:
            sampling_params = SamplingParams()
        params = _of_each("sampling_params", sampling_params, len(prompts), SamplingParams)
        # Nobody looks before the end.
        quiet = {id(one): replace(one, output_kind=RequestOutputKind.FINAL_ONLY) for one in params}
        return self._run(prompts, [quiet[id(one)] for one in params], priority)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
    ) -> list[RequestOutput]:
        """The best hypotheses for every prompt as `outputs`, best first; raises as `generate`."""
        prompts = _as_list(prompts)
        return self._run(prompts, _of_each("params", params, len(prompts), BeamSearchParams), 0)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """The answers to one conversation or to a list of them; see `generate`.

        A conversation is a list of {"role": ..., "content": ...}. RequestError if the engine has
        no chat template or the template refuses the messages.
        """
        prompts = [
            self.chat_prompt(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
            )
            for conversation in _conversations(messages)
        ]
        return self.generate(prompts, sampling_params, priority=priority)

    def chat_prompt(self, messages: Sequence[Message], **options: Any) -> Prompt:
        """See `Tokenizer.chat_prompt`."""
        return self.get_tokenizer().chat_prompt(messages, **options)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        *,
        priority: int = 0,
    ) -> Generator[RequestOutput, None, None]:
        """Completes one prompt and yields its outputs whenever there is more.

        Each holds all of the output so far; with `output_kind` DELTA, what is new. The prompt is
        checked at once; closing the generator aborts the request.
        """
        request_id = str(next(self._request_ids))
        generation = self._llm_engine.prepare(
            request_id, prompt, sampling_params, priority=priority
        )
        return self._stream(generation)

    def apply_chat_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **options: Any
    ) -> str:
        """The text prompt for messages of {"role": ..., "content": ...}."""
        return self.get_tokenizer().apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, **options
        )

    def get_tokenizer(self) -> Tokenizer:
        """The engine's tokenizer; RequestError if it has none."""
        if self._llm_engine.tokenizer is None:
            raise RequestError("the engine has no tokenizer: it serves token ids only")
        return self._llm_engine.tokenizer

    def pin_prefix(self, prompt: Prompt) -> PinnedPrefix:
        """Computes the beginning of later prompts ahead and keeps it cached until released.

        Whole cache blocks are kept; see `LLMEngine.pin_prefix`.
        """
        return self._llm_engine.pin_prefix(prompt)

    def reset_prefix_cache(self) -> None:
        """Forgets every computed prefix save the pinned ones."""
        self._llm_engine.reset_prefix_cache()

    def metrics(self) -> Snapshot:
        """Counters, gauges and histograms by name: see docs/metrics.md."""
        return self._llm_engine.metrics()

    def close(self) -> None:
        """Frees the engine; harmless when called twice."""
        self._llm_engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams] | Sequence[BeamSearchParams],
        priority: int | Sequence[int],
    ) -> list[RequestOutput]:
        priorities = [priority] * len(prompts) if isinstance(priority, int) else priority
        if len(priorities) != len(prompts):
            raise RequestError(
                f"there are {len(priorities)} priorities for {len(prompts)} prompts: "
                "give one for all or one for each"
            )
        generations = [
            self._prepare(index, prompts, params[index], priorities[index])
            for index in range(len(prompts))
        ]
        finished: dict[str, RequestOutput] = {}
        open_ids = {generation.request_id for generation in generations}
        try:
            for generation in generations:
                self._llm_engine.start(generation)
            while open_ids:
                self._step()
                for request_id in open_ids & self._outputs.keys():
                    (output,) = self._outputs.pop(request_id)
                    if output.error is not None:
                        raise output.error
                    finished[request_id] = output
                    open_ids.remove(request_id)
        finally:
            for request_id in open_ids:
                self._llm_engine.abort_request(request_id)
                self._outputs.pop(request_id, None)
        return [finished[generation.request_id] for generation in generations]

    def _prepare(
        self,
        index: int,
        prompts: Sequence[Prompt],
        params: SamplingParams | BeamSearchParams,
        priority: int,
    ) -> Generation:
        request_id = str(next(self._request_ids))
        try:
            return self._llm_engine.prepare(request_id, prompts[index], params, priority=priority)
        except RequestError as error:
            if len(prompts) == 1:
                raise
            raise RequestError(f"prompt {index} of {len(prompts)}: {error}") from None

    def _stream(self, generation: Generation) -> Generator[RequestOutput, None, None]:
        request_id = generation.request_id
        self._llm_engine.start(generation)
        try:
            while True:
                # A `generate` between two outputs of this stream may have moved it on as well.
                if request_id not in self._outputs:
                    self._step()
                    continue
                for output in self._outputs.pop(request_id):
                    if output.error is not None:
                        raise output.error
                    yield output
                    if output.finished:
                        return
        finally:
            self._llm_engine.abort_request(request_id)
            self._outputs.pop(request_id, None)

    def _step(self) -> None:
        for output in self._llm_engine.step():
            self._outputs[output.request_id].append(output)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts are of type {type(prompts).__name__}: give a list of them")
    return prompts


def _conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> Sequence[Sequence[Message]]:
    if not messages or isinstance(messages[0], Mapping):
        return [cast("Sequence[Message]", messages)]
    return cast("Sequence[Sequence[Message]]", messages)


def _of_each(
    name: str, params: _Params | Sequence[_Params], count: int, kind: type[_Params]
) -> Sequence[_Params]:
    if isinstance(params, kind):
        return [params] * count
    if not isinstance(params, Sequence) or len(params) != count:
        given = len(params) if isinstance(params, Sequence) else repr(params)
        raise RequestError(
            f"there are {given} {name} for {count} prompts: give one for all or one for each"
        )
    for one in params:
        if not isinstance(one, kind):
            raise RequestError(f"{name} holds {one!r}: give {kind.__name__}")
    return params
