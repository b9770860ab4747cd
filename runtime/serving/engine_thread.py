"""An engine in a thread of this process."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from octavo.runtime.llm_engine import EngineOptions, LLMEngine
from octavo.runtime.serving.engine_loop import EngineLoop
from octavo.runtime.serving.messages import Command, Event, Progress, Reply, Shutdown
from octavo.runtime.serving.outbox import Outbox
from octavo.runtime.serving.prompt_reading import prompt_reader

if TYPE_CHECKING:
    from octavo.runtime.serving.request_broker import RequestBroker

_logger = logging.getLogger(__name__)


class EngineThread:
    """Takes commands from any thread. An engine that fails for good is not replaced."""

    name = "the engine thread"

    def __init__(self, engine_or_checkpoint: str, options: EngineOptions) -> None:
        self._engine_or_checkpoint = engine_or_checkpoint
        self._options = options
        self._outbox = Outbox()
        self._wake = threading.Event()
        self._broker: RequestBroker
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)

    def start(self, broker: RequestBroker) -> None:
        """Loads the engine in the background; `broker` is told what becomes of it."""
        self._broker = broker
        self._thread.start()

    def post(self, command: Command) -> None:
        self._outbox.put(command)
        self._wake.set()

    def stop(self) -> None:
        """Ends the engine after its current step."""
        self.post(Shutdown())

    def join(self, timeout: float) -> bool:
        """Whether the engine has ended; its step cannot be interrupted."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def receive(self, timeout: float | None) -> list[Command]:
        if timeout != 0.0:
            self._wake.wait(timeout)
        self._wake.clear()
        commands = []
        while (command := self._outbox.take()) is not None:
            commands.append(command)
        return commands

    def send(self, event: Event) -> None:
        assert isinstance(event, Progress | Reply)
        self._broker.receive(event)

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._broker.closed.set_result(None)

    def _serve(self) -> None:
        from octavo.runtime.loading import find_engine

        try:
            bundle = find_engine(self._engine_or_checkpoint)
            engine = LLMEngine(bundle, **self._options)
        except Exception as error:
            self._broker.start_failed(error)
            return
        try:
            self._broker.engine_started(bundle, prompt_reader(bundle, engine.tokenizer))
            EngineLoop(engine, self).run()
        except Exception as error:
            _logger.exception("the engine thread has died")
            cause = f"the engine thread died of {type(error).__name__}: {error}"
            self._broker.engine_died(cause, restarting=False)
        finally:
            engine.close()
