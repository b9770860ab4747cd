"""Generates text from an event loop; the engine runs in a process or thread of its own."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Unpack

from octavo.graphs.errors import EngineClosedError, EngineDeadError, OctavoError, RequestError
from octavo.runtime.capacity import check_positive
from octavo.runtime.llm_engine import EngineOptions
from octavo.runtime.outputs import RequestOutput
from octavo.runtime.prompts import EncodedPrompt, Prompt, PromptReader
from octavo.runtime.sampling.beam_search import BeamSearchParams
from octavo.runtime.sampling.sampling_params import SamplingParams
from octavo.runtime.serving.engine_thread import EngineThread
from octavo.runtime.serving.messages import Command, ReadMetrics, ResetPrefixCache
from octavo.runtime.serving.options import SupervisionOptions
from octavo.runtime.serving.request_broker import RequestBroker
from octavo.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.runtime.metrics.snapshots import Snapshot

# Seconds for which an engine in the middle of a step is waited for, to know its newest metrics.
_METRICS_PATIENCE = 2.0


class AsyncLLM:
    """Generates text for the tasks of an event loop; an async context manager. Not thread-safe.

    engine_or_checkpoint  as in `LLM`, like all further options
    engine                "process": a child process that is started again when it dies; needs
                          `octavo[serve]`. "thread": a thread of this process, which custom
                          `logits_processors` need
    max_open_requests     most requests that run or wait, in the engine or on their way to it
    supervision           see `SupervisionOptions`

    Nothing runs before `start`, which everything that needs the engine does by itself. Errors of
    the options or of loading the engine are raised there, as `LLM` raises them.
    """

    def __init__(
        self,
        engine_or_checkpoint: str | Path,
        *,
        engine: Literal["process", "thread"] = "process",
        max_open_requests: int = 4096,
        supervision: SupervisionOptions | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        check_positive("max_open_requests", max_open_requests)
        self._supervision = supervision or SupervisionOptions()
        self._in_process = engine == "process"
        self._client = _client(engine, os.fspath(engine_or_checkpoint), options, self._supervision)
        self._broker = RequestBroker(self._client.post, max_open_requests=max_open_requests)
        self._running = False
        self._prompts: PromptReader | None = None

    async def start(self) -> None:
        """Loads the engine; harmless when it is loaded. Raises what `LLM` raises if that fails."""
        if self._prompts is not None:
            return
        broker = self._broker
        if not self._running and not broker.started.done():
            self._running = True
            # Whoever forgets `shutdown` leaves nothing behind: neither this object's end nor the
            # interpreter's does.
            weakref.finalize(self, _abandon, broker, self._client, os.getpid(), self._supervision)
            self._client.start(broker)
        self._prompts = await asyncio.wrap_future(broker.started)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Completes a prompt and yields its outputs whenever there is more: `async for`.

        Each holds all of the output so far; with `output_kind` DELTA what is new, with FINAL_ONLY
        there is one. A reader that is slower than the engine gets several steps in one output.
        Leaving the loop, closing the generator or cancelling its task aborts the request.

        The first `anext` raises, and nothing has been queued: RequestError, CapacityError or
        QueueFullError as `LLM` does, EngineClosedError after `drain` or `shutdown`. Any one raises
        EngineDeadError if the engine dies, BackendError if its step fails, EngineClosedError if
        it is shut down.
        """
        prompts = await self._ready()
        encoded, params = self._check(prompts, prompt, sampling_params, priority)
        stream = self._broker.open(
            encoded,
            params,
            request_id=request_id,
            priority=priority,
            loop=asyncio.get_running_loop(),
        )
        try:
            while True:
                output = await stream.next()
                yield output
                if output.finished:
                    return
        finally:
            self._broker.leave(stream)

    async def abort(self, request_id: str) -> bool:
        """Ends a request: its last output has the finish_reason "abort". False if none is open."""
        return self._broker.abort(request_id)

    def get_tokenizer(self) -> Tokenizer:
        """A tokenizer of this process. RequestError if the engine has none.

        OctavoError before `start`: only the engine knows its folder.
        """
        if self._prompts is None:
            raise OctavoError("the AsyncLLM has no tokenizer before it is started: await start()")
        if self._prompts.tokenizer is None:
            raise RequestError("the engine has no tokenizer: it serves token ids only")
        return self._prompts.tokenizer

    @property
    def engine_path(self) -> Path:
        """The folder of the engine, built from the checkpoint if one was given. OctavoError before
        `start`."""
        if self._broker.bundle is None:
            raise OctavoError("the AsyncLLM has no engine before it is started: await start()")
        return self._broker.bundle

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Prompt:
        """See `Tokenizer.chat_prompt`."""
        return self.get_tokenizer().chat_prompt(messages, **options)

    async def pin_prefix(self, prompt: Prompt) -> PinnedPrefixHandle:
        """Computes the beginning of later prompts ahead and keeps it until released.

        An engine that takes a dead one's place computes it again. Raises as `LLM.pin_prefix`.
        """
        prompts = await self._ready()
        key, made = self._broker.pin(prompts.read(prompt))
        try:
            await asyncio.wrap_future(made)
        except asyncio.CancelledError:
            self._broker.release_pin(key)
            raise
        return PinnedPrefixHandle(self._broker, key)

    async def reset_prefix_cache(self) -> None:
        """Forgets every computed prefix save the pinned ones."""
        await self._ready()
        await asyncio.wrap_future(self._broker.ask(ResetPrefixCache))

    async def metrics(self) -> Snapshot:
        """Counters, gauges and histograms by name: see docs/metrics.md.

        Of an engine that does not answer within two seconds, the last known ones. What engines
        counted that have died is in them: counters never go back.
        """
        await self._ready()
        if self._broker.trouble is None:
            try:
                reply = asyncio.wrap_future(self._broker.ask(ReadMetrics))
                await asyncio.wait_for(reply, _METRICS_PATIENCE)
            except (EngineDeadError, TimeoutError):
                pass
        return self._broker.metrics()

    @property
    def is_healthy(self) -> bool:
        """Whether `check_health` raises nothing."""
        return self._complaint() is None

    @property
    def is_dead(self) -> bool:
        """Whether the engine has died and no other one will take its place."""
        return self._broker.dead

    async def check_health(self) -> None:
        """Raises EngineDeadError, naming what died, while no engine runs or it hangs.

        EngineClosedError before `start` and after `shutdown`. A new engine, or a sign of life of
        one that seemed to hang, makes it healthy again.
        """
        if (complaint := self._complaint()) is not None:
            raise complaint

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuses new requests and waits until the open ones have ended in the engine.

        False if they have not after `timeout` seconds. Their readers may still be reading.
        """
        idle = asyncio.wrap_future(self._broker.drain())
        try:
            await asyncio.wait_for(idle, timeout)
        except TimeoutError:
            return False
        return True

    async def shutdown(self) -> None:
        """Ends open requests with an EngineClosedError, then the engine; harmless when repeated."""
        self._broker.shut_down()
        if self._running:
            self._client.stop()
            await asyncio.wrap_future(self._broker.closed)
            self._client.join(self._supervision.shutdown_timeout)

    async def __aenter__(self) -> AsyncLLM:
        try:
            await self.start()
        except BaseException:
            await self.shutdown()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.shutdown()

    async def _ready(self) -> PromptReader:
        await self.start()
        assert self._prompts is not None
        return self._prompts

    def _check(
        self,
        prompts: PromptReader,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | None,
        priority: int,
    ) -> tuple[EncodedPrompt, SamplingParams | BeamSearchParams]:
        """What can be checked without the engine; it checks the rest, then itself all again."""
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority is {priority!r}, it must be an integer")
        encoded = prompts.read(prompt)
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams | BeamSearchParams):
            raise RequestError(f"sampling_params are {params!r}: give SamplingParams")
        if self._in_process and isinstance(params, SamplingParams) and params.logits_processors:
            raise RequestError(
                "logits_processors are given, which cannot be sent to the engine's process: "
                'use AsyncLLM(..., engine="thread")'
            )
        return encoded, params

    def _complaint(self) -> OctavoError | None:
        broker = self._broker
        if broker.trouble is not None:
            return EngineDeadError(broker.trouble)
        if self._prompts is None or broker.closed.done():
            return EngineClosedError("no engine runs: the AsyncLLM is not started, or shut down")
        silence = broker.silence()
        if silence > self._supervision.heartbeat_timeout:
            return EngineDeadError(
                f"{self._client.name} has work and has said nothing for {silence:.0f} s, "
                f"heartbeat_timeout is {self._supervision.heartbeat_timeout:g} s: it may hang"
            )
        return None


class PinnedPrefixHandle:
    """A prefix that stays in the cache until it is released, and after that as others do."""

    def __init__(self, broker: RequestBroker, key: int) -> None:
        self._broker = broker
        self._key = key

    def release(self) -> None:
        """Harmless when called twice, and after the AsyncLLM was shut down."""
        self._broker.release_pin(self._key)


class _Client(Protocol):
    """The engine's side."""

    @property
    def name(self) -> str: ...

    def start(self, broker: RequestBroker) -> None: ...

    def post(self, command: Command) -> None: ...

    def stop(self) -> None: ...

    def join(self, timeout: float) -> bool: ...


def _client(
    engine: str, engine_or_checkpoint: str, options: EngineOptions, supervision: SupervisionOptions
) -> _Client:
    if engine == "thread":
        return EngineThread(engine_or_checkpoint, options)
    if engine != "process":
        raise RequestError(f'engine is {engine!r}, it must be "process" or "thread"')
    try:
        from octavo.runtime.serving.supervisor import EngineSupervisor
    except ImportError as error:
        raise OctavoError(
            f"an engine in its own process needs pyzmq and msgpack ({error}): "
            'install `octavo[serve]`, or use AsyncLLM(..., engine="thread")'
        ) from error
    return EngineSupervisor(engine_or_checkpoint, options, supervision)


def _abandon(
    broker: RequestBroker, client: _Client, owner: int, supervision: SupervisionOptions
) -> None:
    if os.getpid() == owner:  # a fork has this object, but neither its thread nor its engine
        broker.shut_down()
        client.stop()
        client.join(supervision.shutdown_timeout + 1.0)
