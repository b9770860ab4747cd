"""The model as Triton's Python backend runs it: a thin front of an engine in a child process.

Light to import: the server does so once more to look for a configuration.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

from .metrics import ServerMetrics
from .request import BadRequestError, read_request
from .responder import Responder
from .settings import SettingsError, read_settings
from .supervisor import EngineFailedError, RefusedError, Status, Supervisor

# Seconds between two looks for clients that are gone; at least this many for each open request,
# since each look is a call to the server.
_POLL_INTERVAL = 0.01
_POLL_INTERVAL_EACH = 0.002
_METRICS_INTERVAL = 1.0
_WATCHER_TIMEOUT = 2.0  # for a call to a server that is gone, which never returns


class TritonPythonModel:
    """One instance of the model; each has an engine of its own."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the engine; the model is ready when it is."""
        try:
            self._supervisor = Supervisor(read_settings(Path(__file__).parent), os.getppid())
            definitions = self._supervisor.start()
        except (SettingsError, EngineFailedError) as error:
            raise pb_utils.TritonModelException(str(error)) from None
        labels = {
            "model": args["model_name"],
            "version": args["model_version"],
            "instance": args["model_instance_name"],
        }
        self._name = args["model_name"]
        self._metrics = ServerMetrics(pb_utils, labels, definitions)
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="octavo-watch", daemon=True)
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        """Starts the requests; their responses come through the senders, as they are made."""
        for request in requests:
            responder = Responder(pb_utils, request.get_response_sender())
            try:
                self._supervisor.submit(read_request(request), responder)
            except BadRequestError as error:
                responder.fail(str(error), "INVALID_ARG")
            except RefusedError as refused:
                responder.fail(str(refused), refused.code)
            except Exception as error:
                # A request must not take the others of this model with it.
                pb_utils.Logger.log_error(f"a request could not be started: {error!r}")
                responder.fail(f"the request could not be started ({error!r})", "INTERNAL")

    def is_ready(self) -> bool:
        """Asked by releases that ask a model whether it is ready."""
        return self._supervisor.status.complaint is None

    def finalize(self) -> None:
        """Lets the open requests end, then the engine."""
        self._supervisor.stop()
        self._stopping.set()
        self._watcher.join(_WATCHER_TIMEOUT)
        if not self._watcher.is_alive():
            self._metrics.close()

    def _watch(self) -> None:
        """Looks for clients that are gone; publishes health at once, metrics once a second."""
        published, due, unloading = None, 0.0, False
        interval = _POLL_INTERVAL
        while not self._stopping.wait(interval):
            try:
                self._supervisor.cancel_abandoned()
                status = self._supervisor.status
                health = (status.complaint, status.generation)
                if health != published or time.monotonic() >= due:
                    published, due = health, time.monotonic() + _METRICS_INTERVAL
                    self._publish(status)
                if status.given_up and not unloading:
                    unloading = True
                    # In a thread: the server finalizes the model, which waits for this one.
                    threading.Thread(target=self._unload, name="octavo-unload", daemon=True).start()
            except Exception as error:
                pb_utils.Logger.log_error(f"the model's watcher goes on after {error!r}")
            interval = max(_POLL_INTERVAL, _POLL_INTERVAL_EACH * self._supervisor.num_open)

    def _unload(self) -> None:
        """So that it is not ready: a server that is told which models to load allows it."""
        try:
            pb_utils.unload_model(self._name)
        except Exception as error:
            pb_utils.Logger.log_error(f"{self._name} has no engine and stays loaded ({error})")

    def _publish(self, status: Status) -> None:
        self._metrics.publish(
            healthy=status.complaint is None,
            generation=status.generation,
            snapshot=status.snapshot,
        )
