"""The way back to the client of one request."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from . import tensors

_NUMPY_TYPES: dict[str, Any] = {
    tensors.STRING: np.object_,
    tensors.UINT32: np.uint32,
    tensors.FP32: np.float32,
}


class Responder:
    """Thread-safe; after the last response everything is harmless and does nothing.

    The last response carries Triton's FINAL flag: some clients wait for it with the data.
    """

    def __init__(self, pb_utils: Any, sender: Any) -> None:
        self._pb_utils = pb_utils
        self._sender = sender
        self._lock = threading.Lock()
        self._ended = False

    def send(self, outputs: dict[str, list[Any]], *, final: bool) -> None:
        """`outputs`: values by the name of their tensor."""
        made = [self._tensor(name, values) for name, values in outputs.items()]
        self._respond(self._pb_utils.InferenceResponse(output_tensors=made), final=final)

    def fail(self, message: str, code: str) -> None:
        """`code`: a name of `pb_utils.TritonError`, such as INVALID_ARG."""
        error = self._pb_utils.TritonError(message, getattr(self._pb_utils.TritonError, code))
        self._respond(self._pb_utils.InferenceResponse(error=error), final=True)

    def is_cancelled(self) -> bool:
        """Whether the client is gone; a call to the server that takes some 0.1 ms."""
        with self._lock:
            return not self._ended and bool(self._sender.is_cancelled())

    def _respond(self, response: Any, *, final: bool) -> None:
        flags = self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        with self._lock:
            if not self._ended:
                self._ended = final
                self._sender.send(response, flags=flags)

    def _tensor(self, name: str, values: list[Any]) -> Any:
        data_type = tensors.OUTPUTS[name].data_type
        if data_type == tensors.STRING:
            values = [value.encode("utf-8", "replace") for value in values]
        return self._pb_utils.Tensor(name, np.array(values, dtype=_NUMPY_TYPES[data_type]))
