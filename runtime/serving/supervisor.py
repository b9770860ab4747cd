"""An engine in a child process that is watched, and replaced when it dies."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from octavo.graphs.errors import EngineDeadError, OctavoError, RequestError
from octavo.runtime.llm_engine import EngineOptions
from octavo.runtime.prompts import PromptReader
from octavo.runtime.serving import wire
from octavo.runtime.serving.child_process import ChildProcess, private_folder_for_sockets
from octavo.runtime.serving.child_service import TICK, ChildService, expire
from octavo.runtime.serving.engine_process import HIGH_WATER_MARK
from octavo.runtime.serving.messages import Command
from octavo.runtime.serving.options import SupervisionOptions
from octavo.runtime.serving.outbox import Outbox
from octavo.runtime.serving.prompt_reading import load_prompt_reader
from octavo.runtime.serving.wake_pipe import WakePipe

if TYPE_CHECKING:
    from octavo.runtime.serving.request_broker import RequestBroker

_logger = logging.getLogger(__name__)

_MAX_DELAY = 30.0  # seconds


class EngineSupervisor:
    """One thread that owns the sockets and the children, one child at a time."""

    def __init__(
        self, engine_or_checkpoint: str, options: EngineOptions, supervision: SupervisionOptions
    ) -> None:
        try:
            wire.pack(options)
        except (TypeError, ValueError) as error:
            raise RequestError(
                f"an option cannot be sent to the engine's process ({error}): give plain values"
            ) from None
        self._engine = engine_or_checkpoint
        self._options = options
        self._supervision = supervision
        self._broker: RequestBroker
        self._outbox = Outbox()
        self._wake: WakePipe
        self._prompts: PromptReader | None = None
        self._service: ChildService | None = None
        self._stopping = threading.Event()
        self._deaths: deque[float] = deque()
        self._thread = threading.Thread(target=self._run, name="octavo-supervisor", daemon=True)

    @property
    def name(self) -> str:
        service = self._service
        return "the engine process" if service is None else f"the engine process {service.pid}"

    def start(self, broker: RequestBroker) -> None:
        """Starts the engine in the background; `broker` is told what becomes of it."""
        self._broker = broker
        self._wake = WakePipe()
        self._thread.start()

    def post(self, command: Command) -> None:
        self._outbox.put(command)
        self._wake.set()

    def stop(self) -> None:
        """Ends the engine after its current step, or kills it after `shutdown_timeout`."""
        self._stopping.set()
        if (service := self._service) is not None:
            service.stop()
        self._wake.set()

    def join(self, timeout: float) -> bool:
        """Whether the engine has ended."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        folder = None
        try:
            folder = private_folder_for_sockets()
            with zmq.Context() as context:
                self._supervise(context, folder)
        except BaseException as error:
            # Whatever it is: nobody must wait for an engine that nobody watches.
            _logger.exception("the engine's supervisor has failed")
            cause = f"the engine's supervisor died of {type(error).__name__}: {error}"
            self._broker.engine_died(cause, restarting=False)
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            self._wake.close()
            self._broker.closed.set_result(None)

    def _supervise(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> None:
        number = 0
        while not self._stopping.is_set():
            # Each child has its own address: what an older one has left reaches nobody.
            cause, failure = self._run_child(context, f"ipc://{folder}/{number}")
            number += 1
            if self._stopping.is_set():
                return
            if not self._broker.started.done():
                self._broker.start_failed(failure or EngineDeadError(f"{cause} while it started"))
                return
            self._note_death(cause)

    def _run_child(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str
    ) -> tuple[str, Exception | None]:
        """How it ended, and the error that it has reported, if any."""
        with context.socket(zmq.DEALER) as socket:
            socket.set_hwm(HIGH_WATER_MARK)
            socket.linger = 0
            socket.bind(endpoint)
            try:
                child = ChildProcess(endpoint, self._engine, self._options)
            except OSError as error:
                return f"the engine process could not be started ({error})", None
            try:
                service = self._service = self._make_service(child, socket)
                if self._stopping.is_set():
                    service.stop()
                service.run()
            finally:
                self._service = None
                end = child.reap()
        if service.bundle is not None:
            self._engine = str(service.bundle)
        if service.failure is not None:
            end = f"died of {type(service.failure).__name__}: {service.failure}"
        return f"the engine process {child.pid} {end}", service.failure

    def _make_service(self, child: ChildProcess, socket: zmq.Socket[bytes]) -> ChildService:
        return ChildService(
            child,
            socket,
            broker=self._broker,
            outbox=self._outbox,
            wake=self._wake,
            supervision=self._supervision,
            prompts=self._read_prompts(),
        )

    def _read_prompts(self) -> PromptReader | None:
        """While the child starts; None if it must build the engine first, or say what fails."""
        from octavo.backends.bundle import MANIFEST_NAME

        bundle = Path(self._engine)
        if self._prompts is None and (bundle / MANIFEST_NAME).exists():
            with contextlib.suppress(OctavoError):
                self._prompts = load_prompt_reader(bundle)
        return self._prompts

    def _note_death(self, cause: str) -> None:
        """Ends what the dead engine was sent, and waits before the next one, if there is one."""
        now = time.monotonic()
        window = self._supervision.restart_window
        self._deaths.append(now)
        while self._deaths[0] < now - window:
            self._deaths.popleft()
        count = len(self._deaths)
        if count > self._supervision.max_restarts:
            self._stopping.set()
            if count > 1:
                cause += f", the last of {count} deaths within {window:g} s"
            _logger.error("%s: it is not started again", cause)
            self._broker.engine_died(cause, restarting=False)
            return
        _logger.error("%s: it is started again", cause)
        self._broker.engine_died(cause, restarting=True, unsent=self._outbox.keys)
        self._outbox.engine_died()
        delay = 0.0 if count == 1 else self._supervision.restart_delay * 2.0 ** (count - 2)
        end = now + min(_MAX_DELAY, delay)
        while not self._stopping.is_set() and (left := end - time.monotonic()) > 0:
            self._wake.wait(min(left, TICK))
            expire(self._outbox, self._broker, self._supervision)
