"""The engine's process: `python -m octavo.tools.triton.engine_child FD`, started by the stub."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

from octavo.backends.bundle import read_manifest
from octavo.graphs.errors import (
    CapacityError,
    EngineClosedError,
    EngineDeadError,
    OctavoError,
    QueueFullError,
    RequestError,
)
from octavo.runtime import AsyncLLM, SamplingParams, SupervisionOptions
from octavo.runtime.prompts import Prompt
from octavo.tools.triton.child_metrics import exposed_metrics
from octavo.tools.triton.child_request import Responses, read_params
from octavo.tools.triton.stub import frames

_REPORT_INTERVAL = 1.0  # seconds
_SHUTDOWN_TIMEOUT = 5.0
_SERVER_INTERVAL = 0.5

# Of a request: key, tensors by name, [sentence, error code], whether it is the last.
Outcome = tuple[int, dict[str, list[Any]], list[str] | None, bool]


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides what an interrupt means
    if sys.stderr is not None:
        faulthandler.enable()
    sys.exit(asyncio.run(serve(socket.socket(fileno=int(sys.argv[1])))))


async def serve(connection: socket.socket) -> int:
    """Loads the engine that the first message names and serves it; the exit code."""
    reader, writer = await asyncio.open_connection(sock=connection)
    with contextlib.suppress(OSError), contextlib.closing(writer):
        message = await read_frame(reader)
        if message is None:
            return 0
        start = message["start"]
        try:
            _check_protocol(message.get("protocol"))
            read_manifest(Path(start["engine"]))  # an engine: a server builds none
            llm = AsyncLLM(
                start["engine"],
                engine="thread",
                max_open_requests=start["max_open_requests"],
                supervision=SupervisionOptions(heartbeat_timeout=start["heartbeat_timeout"]),
                **start["options"],
            )
            await llm.start()
        except Exception as error:
            await write_frame(writer, {"failed": _sentence(error)})
            return 1
        await write_frame(writer, {"ready": exposed_metrics()})
        if start["server"] is not None:
            stub = os.getppid()
            threading.Thread(target=end_with, args=(start["server"], stub), daemon=True).start()
        cause = await EngineChild(llm, reader, writer).run()
        if cause is not None:
            await write_frame(writer, {"dying": cause})
            return 1
        # Nobody waits for a step that does not end, or for a text that is being read.
        timer = threading.Timer(_SHUTDOWN_TIMEOUT, os._exit, [1])
        timer.daemon = True
        timer.start()
        await llm.shutdown()
    return 0


def end_with(server: int, stub: int) -> None:
    """Ends the stub, and this process with it, once it is no child of `server` any more.

    It cannot do so itself: in a call to a server that was killed it waits for ever, and it holds
    the interpreter's lock there.
    """
    while parent_of(stub) == server:
        time.sleep(_SERVER_INTERVAL)
    if os.getppid() == stub:
        os.kill(stub, signal.SIGKILL)


def parent_of(process: int) -> int | None:
    """None if there is no such process. Source: proc_pid_stat(5)."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next message; None when the other side is gone."""
    try:
        (size,) = frames.LENGTH.unpack(await reader.readexactly(frames.LENGTH.size))
        return frames.decode(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, OSError):
        return None


async def write_frame(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(frames.encode(message))
    await writer.drain()


class EngineChild:
    """Answers the requests of one connection until it ends or the engine dies."""

    def __init__(
        self, llm: AsyncLLM, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._llm = llm
        self._reader = reader
        self._writer = writer
        self._tasks: dict[int, asyncio.Task[None]] = {}
        # At most one of each request: its task waits until this one is delivered.
        self._outcomes: list[Outcome] = []
        self._has_outcomes = asyncio.Event()
        self._next_delivery = asyncio.Event()
        self._delivered = asyncio.Event()
        self._engine_died = asyncio.Event()

    async def run(self) -> str | None:
        """Until the other side is gone: None; or what the engine died of."""
        work = (self._obey(), self._deliver(), self._report(), self._engine_died.wait())
        running = [asyncio.ensure_future(one) for one in work]
        try:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        finally:
            tasks = [*running, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return await self._complaint() if self._engine_died.is_set() else None

    async def _obey(self) -> None:
        while (message := await read_frame(self._reader)) is not None:
            if "add" in message:
                self._add(message["add"], message["request"])
            elif "cancel" in message:
                if (task := self._tasks.get(message["cancel"])) is not None:
                    task.cancel()
            elif "delivered" in message:
                self._delivered.set()

    def _add(self, key: int, request: dict[str, Any]) -> None:
        task = asyncio.create_task(self._answer(key, request))
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def _answer(self, key: int, request: dict[str, Any]) -> None:
        try:
            await self._generate(key, request)
        except EngineDeadError:
            self._engine_died.set()
        except Exception as error:
            await self._hand_over((key, {}, [_sentence(error), _code(error)], True))

    async def _generate(self, key: int, request: dict[str, Any]) -> None:
        returns = request["returns"]
        params = read_params(request["parameters"], stream=request["stream"], returns=returns)
        num_completions = params.n if isinstance(params, SamplingParams) else params.num_returned
        responses = Responses(num_completions, returns, _prefix(request))
        prompt = await self._prompt(request)
        outputs = self._llm.generate(prompt, params, priority=request["priority"])
        async with aclosing(outputs):
            async for output in outputs:
                await self._hand_over((key, responses.tensors(output), None, output.finished))

    async def _prompt(self, request: dict[str, Any]) -> Prompt:
        token_ids = request["token_ids"]
        if token_ids is None:
            # In a thread: the text may be megabytes long, and others must not wait for it.
            tokenizer = self._llm.get_tokenizer()
            token_ids = await asyncio.to_thread(tokenizer.encode, request["text"])
        return {"prompt_token_ids": token_ids, "cache_salt": request["cache_salt"]}

    async def _hand_over(self, outcome: Outcome) -> None:
        """Returns when it is with the client; meanwhile the engine's news are merged."""
        self._outcomes.append(outcome)
        self._has_outcomes.set()
        await self._next_delivery.wait()

    async def _deliver(self) -> None:
        """Everything there is in one message, and the next one when it has been delivered."""
        while True:
            await self._has_outcomes.wait()
            self._has_outcomes.clear()
            outcomes, self._outcomes = self._outcomes, []
            delivery, self._next_delivery = self._next_delivery, asyncio.Event()
            self._delivered.clear()
            await write_frame(self._writer, {"outputs": outcomes})
            await self._delivered.wait()
            delivery.set()

    async def _report(self) -> None:
        """Metrics and health, once a second."""
        while True:
            snapshot = await self._llm.metrics()
            complaint = await self._complaint()
            await write_frame(self._writer, {"metrics": snapshot, "trouble": complaint})
            await asyncio.sleep(_REPORT_INTERVAL)

    async def _complaint(self) -> str | None:
        try:
            await self._llm.check_health()
        except OctavoError as error:
            return str(error)
        return None


def _check_protocol(protocol: object) -> None:
    if protocol != frames.PROTOCOL:
        raise OctavoError(
            f"the model's files speak protocol {protocol} and the Octavo of {sys.executable} "
            f"speaks {frames.PROTOCOL}: export the model again with that Octavo"
        )


def _prefix(request: dict[str, Any]) -> str:
    """What stands before the text of a completion."""
    text, excluded = request["text"], request["exclude_input"]
    if excluded is None:
        excluded = request["stream"] or text is None
    if not excluded and text is None:
        raise RequestError(
            "exclude_input_in_output is false, a prompt of token ids has no text: leave it out"
        )
    return "" if excluded else str(text)


def _code(error: Exception) -> str:
    """The name of an error code of Triton's."""
    if isinstance(error, QueueFullError | EngineClosedError):
        return "UNAVAILABLE"
    return "INVALID_ARG" if isinstance(error, RequestError | CapacityError) else "INTERNAL"


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, OctavoError) else f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
