"""The endpoints, as a FastAPI application that serves one `Service`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.staticfiles import StaticFiles

from octavo.graphs.errors import OctavoError
from octavo.runtime.metrics.prometheus import CONTENT_TYPE, SnapshotCollector
from octavo.tools.server import guard, information
from octavo.tools.server.chat import chat
from octavo.tools.server.completions import complete
from octavo.tools.server.errors import ApiError, api_error
from octavo.tools.server.guard import Guard, RateLimit
from octavo.tools.server.observer import HttpMetrics, Observer
from octavo.tools.server.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from octavo.tools.server.responses import (
    ChatCompletion,
    Completion,
    Detokenization,
    ErrorResponse,
    Info,
    Model,
    ModelList,
    Status,
    Tokenization,
)
from octavo.tools.server.service import Service

PAGE = Path(__file__).parent / "page"

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse, "description": "The request is refused"},
    "5XX": {"model": ErrorResponse, "description": "The server failed, or is not ready"},
}
_LONGEST_SHOWN = 60  # characters of a wrong value
# Nothing that a page loads comes from elsewhere, and no other page may show it in a frame.
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
}


def make_application(service: Service) -> FastAPI:
    """An ASGI application; `service` is to be started and stopped by who serves it.

    OctavoError for a rate limit that cannot be read.
    """
    options = service.options
    rate = None if options.rate_limit is None else RateLimit(options.rate_limit)
    metrics = HttpMetrics()
    # FastAPI's pages of documentation load scripts from elsewhere.
    app = FastAPI(title="Octavo", docs_url=None, redoc_url=None, responses=_ERRORS)
    _handle_errors(app)
    _serve_completions(app, service)
    _serve_information(app, service)
    _serve_operations(app, service, metrics)
    app.add_middleware(Guard, options=options, rate=rate)
    if options.cors_origins:
        # Outside of the guard: what it refuses is to be readable as well.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    app.add_middleware(Observer, metrics=metrics)
    return app


def _handle_errors(app: FastAPI) -> None:
    # Not in a thread, as plain functions would be.
    async def refuse(_request: Request, error: Exception) -> Response:
        return api_error(error).response()

    async def explain(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _invalid(error).response()

    for kind in (OctavoError, HTTPException, Exception):
        app.add_exception_handler(kind, refuse)
    app.add_exception_handler(RequestValidationError, explain)


def _invalid(error: RequestValidationError) -> ApiError:
    """One sentence about one field that is wrong; an unknown one first, as it may be misspelt."""
    errors = sorted(error.errors(), key=lambda one: bool(one["type"] != "extra_forbidden"))
    kind, place = errors[0]["type"], [str(part) for part in errors[0]["loc"][1:]]
    if kind == "json_invalid" or not place:
        return ApiError(400, f"the body is no JSON object of a request: {errors[0]['msg']}")
    if kind == "extra_forbidden":
        name = ".".join(place)
        message = f"the field {name} is unknown: leave it out, or see /openapi.json for its name"
        return ApiError(400, message, param=name, code="unknown_parameter")
    if kind == "missing":
        name = ".".join(place)
        return ApiError(400, f"the field {name} is missing: give it", param=name)
    field = place[0]
    # Of a union there is an error for each of its types.
    complaints = dict.fromkeys(one["msg"] for one in errors if one["loc"][1:2] == (field,))
    given = ascii(errors[0]["input"])
    shown = given if len(given) <= _LONGEST_SHOWN else f"{given[:_LONGEST_SHOWN]}..."
    return ApiError(400, f"{field} holds {shown}: {' / '.join(complaints)}", param=field)


def _serve_completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=Completion)
    async def completions(request: CompletionRequest) -> Response:
        """What follows a prompt, or several; with `stream`, as server-sent events."""
        return await complete(service, request)

    @app.post("/v1/chat/completions", response_model=ChatCompletion)
    async def chat_completions(request: ChatRequest) -> Response:
        """The next message of a conversation; with `stream`, as server-sent events."""
        return await chat(service, request)


def _serve_information(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> ModelList:
        """The names under which the engine is served."""
        return information.models(service)

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Model:
        """One of them."""
        return information.model(service, name)

    @app.post("/tokenize")
    async def tokenize(request: TokenizeRequest) -> Tokenization:
        """The token ids of a prompt or of a conversation."""
        return await information.tokenize(service, request)

    @app.post("/detokenize")
    async def detokenize(request: DetokenizeRequest) -> Detokenization:
        """The text of token ids, special tokens included."""
        return await information.detokenize(service, request)

    @app.get("/info")
    async def info() -> Info:
        """Facts of the engine, for people."""
        return information.info(service)


def _serve_operations(app: FastAPI, service: Service, http_metrics: HttpMetrics) -> None:
    labels = {"model_name": service.options.model_names[0]}

    @app.get("/health")
    async def health() -> Status:
        """Whether the server is to be left running."""
        service.check_live()
        return {"status": service.state}

    @app.get("/ready")
    async def ready() -> Status:
        """Whether a request would run now."""
        await service.check_ready()
        return {"status": "ready"}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Metrics of the engine and of the server in Prometheus' text format."""
        service.check_loaded()
        snapshot = await service.llm.metrics()
        engine_metrics = SnapshotCollector(lambda: snapshot, labels).exposition()
        return Response(engine_metrics + http_metrics.exposition(), media_type=CONTENT_TYPE)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html", headers=_PAGE_HEADERS)

    app.mount(guard.PAGE_PATH, StaticFiles(directory=PAGE))
