"""The outputs of one request, from the engine's thread to the event loop of its reader."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

from octavo.runtime.metrics.request_metrics import RequestTimes
from octavo.runtime.outputs import CompletionOutput, RequestOutput
from octavo.runtime.prompts import EncodedPrompt
from octavo.runtime.sampling.beam_search import BeamSearchParams
from octavo.runtime.sampling.sampling_params import RequestOutputKind, SamplingParams
from octavo.runtime.serving.completion_buffer import CompletionBuffer


def engine_output_kind(params: SamplingParams) -> RequestOutputKind:
    """How the engine is to deliver: deltas, or all at the end where that is all there is."""
    final_only = params.output_kind is RequestOutputKind.FINAL_ONLY
    if final_only or params.num_sequences > params.n:
        return RequestOutputKind.FINAL_ONLY
    return RequestOutputKind.DELTA


class OutputStream:
    """Holds what its reader has not taken yet: never more than one output, which grows.

    Written to by any thread, read by one task of `loop`.
    """

    def __init__(
        self,
        key: int,
        request_id: str,
        prompt: EncodedPrompt,
        params: SamplingParams | BeamSearchParams,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.key = key
        self.request_id = request_id
        self.loop = loop
        self._prompt = prompt
        self._params = params
        self._num_completions = (
            params.n if isinstance(params, SamplingParams) else params.num_returned
        )
        self._arrival = time.monotonic()
        self._in_pieces = (
            isinstance(params, SamplingParams)
            and engine_output_kind(params) is RequestOutputKind.DELTA
        )
        self._wants_deltas = (
            isinstance(params, SamplingParams) and params.output_kind is RequestOutputKind.DELTA
        )
        self._lock = threading.Lock()
        self._buffers: dict[int, CompletionBuffer] = {}
        self._last: RequestOutput | None = None  # the newest one of the engine
        self._error: Exception | None = None
        self._has_news = False
        self._waiter: asyncio.Future[None] | None = None
        self._notified = False

    def push(self, output: RequestOutput) -> bool:
        """Adds an output of the engine; True if the reader is to be woken by `wake`.

        One that carries an error ends the stream with it, after what was pushed before.
        """
        with self._lock:
            if output.error is not None:
                self._error = output.error
                return self._notify()
            if self._last is not None and output.prompt_logprobs is None:
                # They come once, and the reader may not have been there yet.
                output = replace(output, prompt_logprobs=self._last.prompt_logprobs)
            self._last = output
            if self._in_pieces:
                for delta in output.outputs:
                    self._buffer(delta.index).add(delta)
            self._has_news = True
            return self._notify()

    def fail(self, error: Exception) -> bool:
        """Ends the stream with an error, after what was pushed; as `push`."""
        with self._lock:
            self._error = error
            return self._notify()

    def abort(self) -> bool:
        """Ends the stream with a last output, whose finish_reason is "abort"; as `push`."""
        with self._lock:
            if self._last is None or not self._in_pieces:
                self._last = self._empty_output()
            if self._in_pieces:
                for index in range(self._num_completions):
                    self._buffer(index).abort()
            self._last = replace(self._last, finished=True)
            self._has_news = True
            return self._notify()

    def wake(self) -> None:
        """To be called in the reader's event loop."""
        with self._lock:
            waiter, self._waiter = self._waiter, None
            self._notified = False
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def next(self) -> RequestOutput:
        """The next output; raises the error that ended the stream."""
        while True:
            with self._lock:
                if self._has_news:
                    return self._take()
                if self._error is not None:
                    raise self._error
                waiter = self._waiter = self.loop.create_future()
                self._notified = False
            await waiter

    def _notify(self) -> bool:
        """Whether somebody must wake the reader, who is woken once for whatever has come."""
        if self._waiter is None or self._notified:
            return False
        self._notified = True
        return True

    def _take(self) -> RequestOutput:
        assert self._last is not None
        self._has_news = False
        output = self._last
        completions = output.outputs
        if self._in_pieces:
            if self._wants_deltas:
                completions = [one.delta() for one in self._buffers.values() if one.has_news]
                self._last = replace(output, outputs=[], prompt_logprobs=None)
            else:
                completions = [
                    self._buffer(index).whole() for index in range(self._num_completions)
                ]
        return replace(
            output,
            request_id=self.request_id,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            outputs=completions,
        )

    def _buffer(self, index: int) -> CompletionBuffer:
        if index not in self._buffers:
            with_logprobs = getattr(self._params, "logprobs", None) is not None
            self._buffers[index] = CompletionBuffer(index, with_logprobs=with_logprobs)
        return self._buffers[index]

    def _empty_output(self) -> RequestOutput:
        """Of a request that the engine has said nothing about."""
        times = RequestTimes(arrival=self._arrival)
        completions = [
            CompletionOutput(index=index, text="", token_ids=[], finish_reason="abort")
            for index in range(self._num_completions)
        ]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            outputs=completions,
            finished=True,
            num_cached_tokens=0,
            metrics=times.metrics(num_output_tokens=0, num_cached_tokens=0, num_preemptions=0),
        )
