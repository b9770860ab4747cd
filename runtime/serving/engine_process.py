"""The child's side: `python -m octavo.runtime.serving.engine_process`, started by ChildProcess."""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import zmq

from octavo.runtime.llm_engine import LLMEngine
from octavo.runtime.loading import find_engine
from octavo.runtime.serving import wire
from octavo.runtime.serving.engine_loop import Channel, EngineLoop
from octavo.runtime.serving.messages import Command, Event, Failed, Started, StartFailed

_logger = logging.getLogger(__name__)

# Messages that may wait in each direction; the sender then waits, nothing is dropped.
HIGH_WATER_MARK = 64
# Milliseconds to hand over the last message to a parent that reads.
_LINGER = 1000


class SocketChannel:
    """A DEALER socket: it blocks where others drop."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def receive(self, timeout: float | None) -> list[Command]:
        if timeout != 0.0:
            self._socket.poll(None if timeout is None else math.ceil(timeout * 1000))
        commands: list[Command] = []
        while True:
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return commands
            commands.append(wire.decode_command(message))

    def send(self, event: Event) -> None:
        self._socket.send(wire.encode_event(event))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    if sys.stderr is not None:
        faulthandler.enable()
    parent = os.getppid()
    size = int.from_bytes(_read_exactly(8))
    endpoint, engine, options = wire.unpack(_read_exactly(size))
    folder = Path(endpoint.removeprefix("ipc://")).parent
    threading.Thread(target=_end_with_parent, args=(parent, folder), daemon=True).start()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set_hwm(HIGH_WATER_MARK)
        socket.linger = _LINGER
        socket.connect(endpoint)
        code = serve(SocketChannel(socket), engine, options)
    sys.exit(code)


def serve(channel: Channel, engine_or_checkpoint: str, options: dict[str, Any]) -> int:
    """Loads and runs an engine; the exit code."""
    try:
        bundle = find_engine(engine_or_checkpoint)
        engine = LLMEngine(bundle, **options)
    except Exception as error:
        channel.send(StartFailed(error))
        return 1
    try:
        channel.send(Started(str(bundle.absolute())))
        EngineLoop(engine, channel).run()
        return 0
    except Exception as error:
        _logger.exception("the engine process %d has died", os.getpid())
        channel.send(Failed(error))
        return 1
    finally:
        engine.close()


def _read_exactly(size: int) -> bytes:
    data = sys.stdin.buffer.read(size)
    if len(data) < size:
        sys.exit(0)  # the parent has died already
    return data


def _end_with_parent(parent: int, folder: Path) -> None:
    """The parent's end closes stdin, unless a fork of the parent holds it open."""
    import select

    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    while not poll.poll(1000) and os.getppid() == parent:
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
