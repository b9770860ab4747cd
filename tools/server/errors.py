"""OpenAI's error objects, and which of them an error of Octavo's becomes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.responses import Response

from octavo.graphs.errors import (
    CapacityError,
    ContextLengthError,
    EngineClosedError,
    EngineDeadError,
    QueueFullError,
    RequestError,
)
from octavo.tools.server.responses import ErrorResponse

# Seconds after which a refused client may try again.
_RETRY_AFTER = "1"


class ApiError(HTTPException):
    """An answer that is an error.

    kind   OpenAI's type: what sort of error it is
    param  the field of the request that is wrong, if it is one
    code   what programs may act on, such as "context_length_exceeded"
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.kind = kind
        self.param = param
        self.code = code

    def body(self) -> ErrorResponse:
        return {
            "error": {
                "message": str(self.detail),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        # In ASCII: a message may quote characters of the request that UTF-8 cannot express.
        return Response(
            json.dumps(self.body()),
            self.status_code,
            headers=self.headers,
            media_type="application/json",
        )


def api_error(error: BaseException) -> ApiError:
    """What a client is told; of errors that are none of Octavo's, nothing of their inside."""
    match error:
        case ApiError():
            return error
        case HTTPException():  # of the router: no such path, no such method
            phrase = HTTPStatus(error.status_code).phrase
            headers = error.headers
            return ApiError(error.status_code, f"{phrase}: see /openapi.json", headers=headers)
        case ContextLengthError():
            return ApiError(400, str(error), code="context_length_exceeded")
        case RequestError():
            return ApiError(400, str(error))
        case QueueFullError():
            return busy(str(error))
        case CapacityError():
            return ApiError(400, str(error), code="capacity_exceeded")
        case EngineDeadError() | EngineClosedError():
            return unavailable(str(error))
    return ApiError(500, f"the server failed ({type(error).__name__})", kind="server_error")


def busy(message: str) -> ApiError:
    return ApiError(
        429,
        message,
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": _RETRY_AFTER},
    )


def unavailable(message: str) -> ApiError:
    return ApiError(
        503,
        message,
        kind="service_unavailable_error",
        code="service_unavailable",
        headers={"Retry-After": _RETRY_AFTER},
    )
