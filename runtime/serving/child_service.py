"""Carries commands to one child and its events back, for as long as the child lives."""

from __future__ import annotations

import time
from pathlib import Path

import zmq

from octavo.runtime.prompts import PromptReader
from octavo.runtime.serving import wire
from octavo.runtime.serving.child_process import ChildProcess
from octavo.runtime.serving.engine_loop import refusal
from octavo.runtime.serving.messages import (
    AbortRequest,
    Command,
    Event,
    Failed,
    PinPrefix,
    Progress,
    ReadMetrics,
    ReleasePin,
    Reply,
    ResetPrefixCache,
    Shutdown,
    Started,
    StartFailed,
)
from octavo.runtime.serving.options import SupervisionOptions
from octavo.runtime.serving.outbox import Outbox
from octavo.runtime.serving.prompt_reading import load_prompt_reader
from octavo.runtime.serving.request_broker import RequestBroker
from octavo.runtime.serving.wake_pipe import WakePipe

# Seconds between two looks at what nothing wakes the thread for.
TICK = 0.2
# For how long, in seconds, a dead child's last messages are waited for.
_LAST_WORDS = 0.05
# Messages read before commands are sent again.
_MOST_AT_ONCE = 256


class ChildService:
    """Never waits for the child to read: so the child, which does wait for its parent, moves on.

    prompts  reads prompts for the engine; None: what does is read once the engine has started
    bundle   the engine's folder, once the child has started
    failure  the error that ended the child, if it has reported one
    """

    def __init__(
        self,
        child: ChildProcess,
        socket: zmq.Socket[bytes],
        *,
        broker: RequestBroker,
        outbox: Outbox,
        wake: WakePipe,
        supervision: SupervisionOptions,
        prompts: PromptReader | None,
    ) -> None:
        self._child = child
        self._socket = socket
        self._broker = broker
        self._outbox = outbox
        self._wake = wake
        self._supervision = supervision
        self._prompts = prompts
        self._stop_at: float | None = None  # when a child that is to end is killed
        self._asked_to_stop = False
        self.bundle: Path | None = None
        self.failure: Exception | None = None

    @property
    def pid(self) -> int:
        return self._child.pid

    def run(self) -> None:
        """Returns when the child has ended, or has reported that it cannot go on."""
        poller = zmq.Poller()
        poller.register(self._wake.fd, zmq.POLLIN)
        if self._child.pidfd is not None:
            poller.register(self._child.pidfd, zmq.POLLIN)
        while not self._child.ended:
            writes = self._outbox and self.bundle is not None and self._stop_at is None
            poller.register(self._socket, zmq.POLLIN | zmq.POLLOUT if writes else zmq.POLLIN)
            poller.poll(self._timeout())
            self._wake.clear()
            self._read()
            if self.failure is not None:
                return
            if self._stop_at is not None:
                self._stop_child(self._stop_at)
            elif self.bundle is not None:
                self._write()
            else:
                expire(self._outbox, self._broker, self._supervision)
        while self.failure is None and self._socket.poll(int(_LAST_WORDS * 1000)):
            self._read()

    def stop(self) -> None:
        """Asks the child to end; it is killed if it does not. `wake` is to be set after this."""
        if self._stop_at is None:
            self._stop_at = time.monotonic() + self._supervision.shutdown_timeout

    def _timeout(self) -> int | None:
        """Milliseconds; None where everything of interest wakes the thread."""
        starting = self.bundle is None and self._outbox
        if self._child.pidfd is None or self._stop_at is not None or starting:
            return int(TICK * 1000)
        return None

    def _read(self) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(wire.decode_event(message))

    def _take(self, event: Event) -> None:
        match event:
            case StartFailed(error) | Failed(error):
                self.failure = error
            case Started(bundle):
                self.bundle = Path(bundle)
                if self._prompts is None:
                    self._prompts = load_prompt_reader(self.bundle)
                self._outbox.put_first(self._broker.pins)
                self._broker.engine_started(self.bundle, self._prompts)
            case Progress() | Reply():
                self._broker.receive(event)

    def _write(self) -> None:
        while (command := self._outbox.take()) is not None:
            try:
                message = wire.encode_command(command)
            except Exception as error:  # a value that no check has caught
                self._refuse(command, error)
                continue
            try:
                self._socket.send(message, zmq.NOBLOCK)
            except zmq.Again:
                self._outbox.put_first([command])
                return

    def _refuse(self, command: Command, error: Exception) -> None:
        match command:
            case PinPrefix(key) | ResetPrefixCache(key) | ReadMetrics(key):
                self._broker.receive(Reply(key, error=refusal(error)))
            case AbortRequest() | ReleasePin() | Shutdown():
                raise error
            case _:
                self._broker.receive(Progress([(command.key, refusal(error))]))

    def _stop_child(self, deadline: float) -> None:
        """One that still loads an engine reads nothing and has nothing to lose."""
        if self.bundle is None or time.monotonic() >= deadline:
            self._child.kill()
        elif not self._asked_to_stop:
            try:
                self._socket.send(wire.encode_command(Shutdown()), zmq.NOBLOCK)
                self._asked_to_stop = True
            except zmq.Again:
                pass


def expire(outbox: Outbox, broker: RequestBroker, supervision: SupervisionOptions) -> None:
    """Gives up what has waited too long for an engine that is not there yet."""
    if keys := outbox.take_older_than(supervision.restart_timeout):
        broker.expire(keys, supervision.restart_timeout)
