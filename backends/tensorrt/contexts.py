"""A deserialised engine and its execution contexts."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.backends.tensorrt import plugin
from octavo.backends.tensorrt.flavour import Flavour
from octavo.backends.tensorrt.library_log import Log, last_error, make_log
from octavo.backends.tensorrt.step_shapes import Shape
from octavo.backends.tensorrt.surroundings import Kernels, Surroundings, surrounded
from octavo.graphs.errors import BackendError


class Context:
    """One execution context of one profile; shapes are told to TensorRT when they change."""

    def __init__(self, context: Any, log: Log) -> None:
        self._context = context
        self._log = log
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}

    def set_shapes(self, shapes: Mapping[str, Shape]) -> None:
        for name, shape in shapes.items():
            if self._shapes.get(name) != shape:
                self._require(self._context.set_input_shape(name, shape), f"the shape of {name}")
                self._shapes[name] = shape

    def set_addresses(self, addresses: Mapping[str, int]) -> None:
        for name, address in addresses.items():
            if self._addresses.get(name) != address:
                taken = self._context.set_tensor_address(name, address)
                self._require(taken, f"the address of {name}")
                self._addresses[name] = address

    def enqueue(self, stream: int) -> None:
        self._log.errors.clear()
        if not self._context.execute_async_v3(stream):
            # The first error is the cause, what follows says who gave up because of it.
            cause = self._log.errors[0] if self._log.errors else last_error(self._log)
            raise BackendError(f"TensorRT failed in a step: {cause}")

    def is_capturable(self, stream: int) -> bool:
        """Whether a step of the shapes set can be recorded; TensorRT-RTX alone may say no."""
        asked = getattr(self._context, "is_stream_capturable", None)
        return True if asked is None else bool(asked(stream))

    def _require(self, taken: bool, what: str) -> None:
        if not taken:
            raise BackendError(f"TensorRT does not take {what}: {last_error(self._log)}")


class EngineContexts:
    """Makes the contexts of an engine, all of which compute in the same memory, one at a time."""

    def __init__(self, trt: Any, flavour: Flavour, path: Path, kernels: Kernels) -> None:
        self._trt, self._flavour = trt, flavour
        self._log = make_log(trt)
        plugin.register(trt)
        self._runtime = trt.Runtime(self._log)
        with surrounded(Surroundings(kernels, self._log.errors)):
            self._engine = self._deserialized(path)
        if self._engine is None:
            raise BackendError(
                f"{flavour.title} {trt.__version__} cannot load {path}: {last_error(self._log)}"
            )
        if self._engine.streamable_weights_size > 0:
            # Must come before the first context: as many weights on the device as fit.
            budget = self._engine.get_weight_streaming_automatic_budget()
            self._engine.weight_streaming_budget_v2 = budget

    @property
    def num_profiles(self) -> int:
        return int(self._engine.num_optimization_profiles)

    @property
    def memory_bytes(self) -> int:
        """That any of the profiles needs to compute in."""
        sizes = [
            self._engine.get_device_memory_size_for_profile_v2(index)
            for index in range(self.num_profiles)
        ]
        return max(map(int, sizes))

    def make(self, profile: int, memory: int, stream: int) -> Context:
        """A context of a profile that computes in `memory`, of `memory_bytes` bytes."""
        context = self._create()
        if context is None or not context.set_optimization_profile_async(profile, stream):
            raise BackendError(
                f"{self._flavour.title} cannot make a context of the profile {profile}: "
                f"{last_error(self._log)}"
            )
        context.set_device_memory(memory, self.memory_bytes)
        return Context(context, self._log)

    def _deserialized(self, path: Path) -> Any:
        """Mapped, so that the weights are not in memory twice while they go to the device."""
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
            return self._runtime.deserialize_cuda_engine(plan)

    def _create(self) -> Any:
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        specialization = getattr(self._trt, "DynamicShapesKernelSpecializationStrategy", None)
        if specialization is None:
            return self._engine.create_execution_context(strategy)
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        # Kernels compiled for shapes as they come would stall steps, and in the background they
        # would change a request's numbers from one step to the next.
        config.dynamic_shapes_kernel_specialization_strategy = specialization.NONE
        return self._engine.create_execution_context(config)

    def close(self) -> None:
        self._engine = self._runtime = None
