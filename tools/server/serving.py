"""Runs the application: listens at once, loads the engine meanwhile, and drains before it ends."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import socket
import threading
from collections.abc import Generator
from typing import Any

import typer
import uvicorn
from uvicorn.server import HANDLED_SIGNALS

from octavo.graphs.errors import OctavoError
from octavo.tools.server.application import make_application
from octavo.tools.server.service import Service

_logger = logging.getLogger(__name__)

# Connections that wait to be accepted.
_BACKLOG = 2048
# Seconds between two looks at whether the user insists on an end.
_TICK = 0.1
# Seconds for answers that are being written when the engine has ended.
_LAST_WRITES = 5


def run(service: Service, host: str, port: int, *, log_level: str = "info", **options: Any) -> None:
    """Serves until SIGTERM or SIGINT, and says where; `options` are uvicorn's.

    Port 0 takes a free one. OctavoError if the address is not to be had; raises what keeps the
    engine from loading.
    """
    log_config = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    log_config["handlers"]["access"]["stream"] = "ext://sys.stderr"
    log_config["loggers"]["octavo"] = {"handlers": ["default"], "level": log_level.upper()}
    config = uvicorn.Config(
        make_application(service),
        lifespan="off",
        timeout_graceful_shutdown=_LAST_WRITES,
        server_header=False,
        log_config=log_config,
        log_level=log_level,
        **options,
    )
    listener = _listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    scheme = "https" if config.is_ssl else "http"
    name = service.options.model_names[0]
    typer.echo(f"{name} is served at {scheme}://{shown}:{listener.getsockname()[1]}")
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(EngineServer(config, service).serve_engine(listener))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)  # from now on clients wait, and are not refused
    except OSError as error:
        listener.close()
        raise OctavoError(
            f"the server cannot listen at {host}:{port} ({error.strerror}): choose another --host "
            "or --port"
        ) from None
    return listener


class EngineServer(uvicorn.Server):
    """Ends when a signal says so, or the engine cannot be loaded."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._loading: asyncio.Task[None]

    async def serve_engine(self, listener: socket.socket) -> None:
        self._loading = asyncio.create_task(self._load())
        await self.serve([listener])
        if not self._loading.cancelled():
            await self._loading

    async def _load(self) -> None:
        try:
            await self._service.start()
        except BaseException:
            self.should_exit = True
            raise
        _logger.info("the engine is ready")

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """A first signal ends the server in good order, a second one at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in HANDLED_SIGNALS:
            loop.add_signal_handler(number, self._end)
        try:
            yield
        finally:
            for number in HANDLED_SIGNALS:
                loop.remove_signal_handler(number)

    def _end(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """New requests are refused, with a reason, for as long as open ones go on."""
        self._loading.cancel()
        stopping = asyncio.create_task(self._service.stop())
        while not stopping.done() and not self.force_exit:
            await asyncio.wait([stopping], timeout=_TICK)
        if not stopping.done():
            stopping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await stopping
            await self._service.llm.shutdown()
        await super().shutdown(sockets)
