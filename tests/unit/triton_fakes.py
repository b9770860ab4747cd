"""What Triton's Python backend gives to a model, as far as a model of Octavo uses it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

FINAL = 1


class TritonError(Exception):
    UNAVAILABLE, INVALID_ARG, INTERNAL, CANCELLED = "unavailable", "invalid", "internal", "cancel"

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Metric:
    def __init__(self, labels: dict[str, str]) -> None:
        self.labels = labels
        self.value = 0.0

    def increment(self, amount: float) -> None:
        assert amount > 0
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value


class MetricFamily:
    COUNTER, GAUGE = "counter", "gauge"
    made: dict[str, MetricFamily]  # those of one module

    def __init__(self, *, name: str, description: str, kind: str) -> None:
        assert name not in self.made, f"{name} is made twice"
        self.made[name] = self
        self.kind = kind
        self.metrics: list[Metric] = []

    def Metric(self, *, labels: dict[str, str]) -> Metric:  # noqa: N802
        assert labels not in [metric.labels for metric in self.metrics]
        self.metrics.append(Metric(labels))
        return self.metrics[-1]


class Sender:
    """Keeps the responses to one request; `delay`: seconds that sending one takes."""

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.cancelled = False
        self.responses: list[Any] = []
        self.ended = threading.Event()

    def send(self, response: Any, *, flags: int) -> None:
        assert not self.ended.is_set(), "a response after the last one"
        time.sleep(self.delay)
        self.responses.append(response)
        if flags == FINAL:
            self.ended.set()

    def is_cancelled(self) -> bool:
        return self.cancelled

    def wait(self, timeout: float = 30.0) -> list[Any]:
        """All responses; raises the error of the last one."""
        assert self.ended.wait(timeout), "no last response came"
        if (error := self.responses[-1].error) is not None:
            raise error
        return self.responses

    def text(self) -> str:
        """All text of the first completion."""
        return "".join(self.values("text_output", response) for response in self.wait())

    def values(self, name: str, response: Any) -> str:
        return str(response.outputs[name].array[0].decode())


class Tensor:
    def __init__(self, name: str, array: Any) -> None:
        self._name = name
        self.array = array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self.array


class Request:
    """`inputs`: arrays, or values that become one: texts as bytes."""

    def __init__(self, *, parameters: str = "{}", sender: Sender | None = None, **inputs: Any):
        self._inputs = [Tensor(name, _array(value)) for name, value in inputs.items()]
        self._parameters = parameters
        self.sender = sender or Sender()

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def parameters(self) -> str:
        return self._parameters

    def get_response_sender(self) -> Sender:
        return self.sender


def _array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value
    elements = value if isinstance(value, list) else [value]
    if isinstance(elements[0], str):
        return np.array([one.encode() for one in elements], dtype=np.object_)
    return np.array(elements)


def backend_utils() -> Any:
    """A module `triton_python_backend_utils`."""

    class OwnMetricFamily(MetricFamily):
        made: dict[str, MetricFamily] = {}  # noqa: RUF012

    def inference_response(output_tensors: Any = (), error: Any = None) -> Any:
        outputs = {tensor.name(): tensor for tensor in output_tensors}
        return SimpleNamespace(outputs=outputs, error=error)

    unloaded: list[str] = []
    return SimpleNamespace(
        unloaded=unloaded,
        unload_model=unloaded.append,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
        InferenceResponse=inference_response,
        Logger=SimpleNamespace(log_error=lambda message: None),
        MetricFamily=OwnMetricFamily,
        Tensor=Tensor,
        TritonError=TritonError,
        TritonModelException=type("TritonModelException", (Exception,), {}),
    )


def wait_until(condition: Callable[[], bool], timeout: float = 30.0) -> None:
    end = time.monotonic() + timeout
    for _ in itertools.count():
        if condition():
            return
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.005)
