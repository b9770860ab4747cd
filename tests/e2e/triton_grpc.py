"""Requests to a Triton server through its own asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from tritonclient.grpc import InferInput  # type: ignore[import-untyped]
from tritonclient.grpc.aio import InferenceServerClient  # type: ignore[import-untyped]

from octavo.tools.triton.stub.tensors import INPUTS
from tests.e2e.triton_server import Server

_NUMPY_TYPES: dict[str, Any] = {
    "TYPE_STRING": np.object_,
    "TYPE_BOOL": np.bool_,
    "TYPE_INT32": np.int32,
    "TYPE_UINT64": np.uint64,
    "TYPE_FP32": np.float32,
}


@dataclass
class Response:
    """One response: values by tensor, or the error."""

    outputs: dict[str, list[Any]]
    error: str | None
    final: bool

    def text(self) -> str:
        (text,) = self.outputs["text_output"]
        return str(text)


def infer_inputs(values: dict[str, Any]) -> list[InferInput]:
    return [_input(name, value) for name, value in values.items()]


def _input(name: str, value: Any) -> InferInput:
    data_type = INPUTS[name].data_type
    elements = value if isinstance(value, list) else [value]
    if data_type == "TYPE_STRING":
        elements = [one if isinstance(one, bytes) else one.encode() for one in elements]
    array = np.array(elements, dtype=_NUMPY_TYPES[data_type])
    triton_type = "BYTES" if data_type == "TYPE_STRING" else data_type.removeprefix("TYPE_")
    made = InferInput(name, list(array.shape), triton_type)
    made.set_data_from_numpy(array)
    return made


@asynccontextmanager
async def client(server: Server) -> AsyncIterator[InferenceServerClient]:
    made = InferenceServerClient(f"127.0.0.1:{server.grpc}")
    try:
        yield made
    finally:
        await made.close()


def responses(connection: InferenceServerClient, model: str, **values: Any) -> Any:
    """The client's own iterator over (result, error), with `cancel`."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": model, "inputs": infer_inputs(values)}

    return connection.stream_infer(requests())


async def stream(server: Server, model: str, **values: Any) -> list[Response]:
    """All responses to one request, up to the last."""
    found = []
    async with client(server) as connection:
        async for result, error in responses(connection, model, **values):
            found.append(read(result, error))
            if found[-1].final:
                return found
    raise AssertionError("the stream ended without a final response")


def read(result: Any, error: Exception | None) -> Response:
    if error is not None:
        return Response({}, str(error), True)
    answer = result.get_response()
    outputs = {one.name: list(result.as_numpy(one.name).tolist()) for one in answer.outputs}
    texts = {
        name: [one.decode() if isinstance(one, bytes) else one for one in values]
        for name, values in outputs.items()
    }
    return Response(texts, None, answer.parameters["triton_final_response"].bool_param)


def run_all(*streams: Any) -> list[list[Response]]:
    """Several streams at the same time."""

    async def gather() -> list[list[Response]]:
        return list(await asyncio.gather(*streams))

    return asyncio.run(gather())
