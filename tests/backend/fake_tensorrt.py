"""A TensorRT whose engines are JSON and whose steps are arithmetic, on the memory of `fake_cuda`.

A step writes each token's id into every layer's cache, at its slot, through the address that the
cache's output has; then a row of logits is, at index v: the sum of the ids of the row's sequence up
to the row, read from the cache of the last layer by the block table, plus v / 1024.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.backend.fake_cuda import FakeCuda

NAME = "fake_tensorrt"
VERSION = "1.2.3"
Severity = IntEnum("Severity", "INTERNAL_ERROR ERROR WARNING INFO VERBOSE", start=0)
DataType = IntEnum("DataType", "FLOAT HALF INT8 INT32 BF16 FP8", start=0)
TensorFormat = IntEnum("TensorFormat", "LINEAR CHW4", start=0)
PluginFieldType = IntEnum("PluginFieldType", "FLOAT32 INT32", start=0)
Strategy = IntEnum("Strategy", "STATIC USER_MANAGED", start=0)
Specialization = IntEnum("Specialization", "LAZY EAGER NONE", start=0)


class Base:
    """What the classes of plugins, creators and loggers derive from."""

    def __init__(self) -> None:
        """pybind11 insists on this call, and so does the code under test."""


class IPluginV3(Base): ...


class IPluginV3OneCore(Base): ...


class IPluginV3OneBuildV2(Base): ...


class IPluginV3OneRuntime(Base): ...


class IPluginCreatorV3One(Base): ...


class ILogger(Base):
    Severity = Severity


@dataclass
class PluginField:
    name: str
    data: NDArray[Any]
    type: PluginFieldType


@dataclass(frozen=True)
class TensorDesc:
    dims: tuple[int, ...]
    type: DataType
    format: TensorFormat = TensorFormat.LINEAR


class Registry:
    def __init__(self) -> None:
        self.creators: dict[str, Any] = {}

    def register_creator(self, creator: Any, namespace: str) -> bool:
        name = f"{namespace}::{creator.name}"
        if name in self.creators:
            return False
        self.creators[name] = creator
        return True


class RuntimeConfig:
    def __init__(self) -> None:
        self.strategy: Strategy | None = None
        self.dynamic_shapes_kernel_specialization_strategy = Specialization.LAZY

    def set_execution_context_allocation_strategy(self, strategy: Strategy) -> None:
        self.strategy = strategy


@dataclass
class FakeTensorRt:
    """The state behind the module, and what was done."""

    cuda: FakeCuda
    registry: Registry = field(default_factory=Registry)
    engines: list[Engine] = field(default_factory=list)
    fails: str | None = None  # what the next step says instead of running
    capturable: bool = True

    def module(self) -> ModuleType:
        module = ModuleType(NAME)
        vars(module).update(
            __version__=VERSION,
            IPluginV3=IPluginV3,
            IPluginV3OneCore=IPluginV3OneCore,
            IPluginV3OneBuildV2=IPluginV3OneBuildV2,
            IPluginV3OneRuntime=IPluginV3OneRuntime,
            IPluginCreatorV3One=IPluginCreatorV3One,
            ILogger=ILogger,
            DataType=DataType,
            TensorFormat=TensorFormat,
            PluginField=PluginField,
            PluginFieldType=PluginFieldType,
            PluginFieldCollection=list,
            DimsExprs=list,
            ExecutionContextAllocationStrategy=Strategy,
            DynamicShapesKernelSpecializationStrategy=Specialization,
            Runtime=lambda log: Runtime(self, log),
            get_plugin_registry=lambda: self.registry,
        )
        return module


def _field(name: str, value: float) -> PluginField:
    """As the plugin serialised it."""
    if isinstance(value, int):
        return PluginField(name, np.array([value], np.int32), PluginFieldType.INT32)
    return PluginField(name, np.array([value], np.float32), PluginFieldType.FLOAT32)


class Runtime:
    def __init__(self, fake: FakeTensorRt, log: Any) -> None:
        self._fake, self._log = fake, log

    def deserialize_cuda_engine(self, plan: Any) -> Engine | None:
        try:
            content = json.loads(bytes(plan))
        except ValueError:
            self._log.log(Severity.ERROR, "Magic tag does not match")
            return None
        engine = Engine(self._fake, self._log, content)
        self._fake.engines.append(engine)
        return engine


class Engine:
    def __init__(self, fake: FakeTensorRt, log: Any, content: dict[str, Any]) -> None:
        self.fake, self.log, self.content = fake, log, content
        self.num_optimization_profiles = int(content["num_profiles"])
        self.streamable_weights_size = int(content.get("streamable", 0))
        self.weight_streaming_budget_v2: int | None = None
        self.contexts: list[Context] = []
        self.executed: list[int] = []  # profiles of the steps that ran
        self.plugins = []
        for layer in content.get("layers", []):
            fields = [_field(name, value) for name, value in layer.items()]
            creator = fake.registry.creators["octavo::PagedAttention"]
            self.plugins.append(creator.create_plugin("layer", fields, "runtime"))

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        return 1000 * (index + 1)

    def get_weight_streaming_automatic_budget(self) -> int:
        return 12345

    def create_runtime_config(self) -> RuntimeConfig:
        return RuntimeConfig()

    def create_execution_context(self, config: RuntimeConfig) -> Context:
        context = Context(self, config)
        self.contexts.append(context)
        return context


class Context:
    def __init__(self, engine: Engine, config: RuntimeConfig) -> None:
        self.engine, self.config = engine, config
        self.budget = engine.weight_streaming_budget_v2
        self.profile = -1
        self.memory = (0, 0)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.plugins = [plugin.attach_to_context(None) for plugin in engine.plugins]

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.profile = index
        return index < self.engine.num_optimization_profiles

    def set_device_memory(self, address: int, size: int) -> None:
        self.memory = (address, size)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = tuple(shape)
        return name in self.engine.content["inputs"]

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return name in self.engine.content["inputs"] + self.engine.content["outputs"]

    def is_stream_capturable(self, stream: int) -> bool:
        return self.engine.fake.capturable

    def execute_async_v3(self, stream: int) -> bool:
        fake = self.engine.fake
        assert stream == 7
        if fake.fails is not None:
            self.engine.log.log(Severity.ERROR, fake.fails)
            fake.fails = None
            return False
        self.engine.executed.append(self.profile)
        for layer, plugin in enumerate(self.plugins):
            try:
                self._enqueue_plugin(layer, plugin, stream)
            except Exception:  # which pybind11 prints
                self.engine.log.log(Severity.ERROR, "Error Code 6: API Usage Error (enqueueV3)")
                return False
        shapes, addresses = dict(self.shapes), dict(self.addresses)
        fake.cuda.enqueue(lambda: compute(fake.cuda, shapes, addresses, self.engine.content))
        return True

    def _enqueue_plugin(self, layer: int, plugin: Any, stream: int) -> None:
        """Inputs as in the schema; what lies between the network's inputs is made up."""
        tokens, dtype = self.shapes["token_ids"][0], DataType[self.engine.content["dtype"]]
        heads, kv_heads, head, value = self.engine.content["heads"]
        cache = f"kv_cache.{layer}"
        empty = TensorDesc((0,), DataType.FLOAT)
        inputs = [
            TensorDesc((tokens, heads, head), dtype),
            TensorDesc((tokens, kv_heads, head), dtype),
            TensorDesc((tokens, kv_heads, value), dtype),
            TensorDesc(self.shapes[cache], dtype),
            *(TensorDesc(self.shapes[name], DataType.INT32) for name in STEP_OPERANDS),
            empty,
            empty,
        ]
        addresses = [1, 2, 3, self.addresses[cache]]
        addresses += [self.addresses[name] for name in STEP_OPERANDS] + [8, 9]
        plugin.on_shape_change(inputs, [])
        plugin.enqueue(inputs, [], addresses, [10, self.addresses[cache]], 0, stream)


STEP_OPERANDS = ("slot_mapping", "block_tables", "query_start_loc", "prefix_offsets")


def compute(
    cuda: FakeCuda,
    shapes: dict[str, tuple[int, ...]],
    addresses: dict[str, int],
    content: dict[str, Any],
) -> None:
    def array(name: str, dtype: str = "int32", shape: Sequence[int] = ()) -> NDArray[Any]:
        sizes = tuple(shape) or shapes[name]
        size = int(np.prod(sizes)) * np.dtype(dtype).itemsize
        return cuda.view(addresses[name], size).view(dtype).reshape(sizes)

    tokens = array("token_ids")
    columns = np.arange(content["vocab"], dtype=np.float32) / 1024
    if "features" in content["inputs"]:
        rows = np.repeat(tokens + array("features", "float32").sum(1), content["drafts"])
        array("logits", "float32", (len(rows), len(columns)))[:] = rows[:, None] + columns
        return
    for name in content["outputs"]:
        if name.startswith("kv_cache_out"):
            cache = array(name, "float32", shapes[name.replace("_out", "")])
            Slots(cache).write(array("slot_mapping"), tokens)
    totals = _totals(Slots(cache), array, len(tokens))
    rows = totals[array("logits_indices")]
    array("logits", "float32", (len(rows), len(columns)))[:] = rows[:, None] + columns


@dataclass(frozen=True)
class Slots:
    """The first number of every slot [N * block_size] of a cache, where tokens are written."""

    cache: NDArray[Any]

    @property
    def block_size(self) -> int:
        return int(self.cache.shape[3])

    def write(self, slots: NDArray[Any], values: NDArray[Any]) -> None:
        self.cache[slots // self.block_size, 0, 0, slots % self.block_size, 0] = values

    def read(self, slots: NDArray[Any]) -> NDArray[Any]:
        found: NDArray[Any] = self.cache[slots // self.block_size, 0, 0, slots % self.block_size, 0]
        return found


def _totals(slots: Slots, array: Any, num_tokens: int) -> NDArray[np.float32]:
    totals = np.zeros(num_tokens, np.float32)
    starts, tables = array("query_start_loc"), array("block_tables")
    for row, prefix in enumerate(array("prefix_offsets")):
        for token in range(starts[row], starts[row + 1]):
            at = np.arange(prefix + token - starts[row] + 1)
            physical = tables[row][at // slots.block_size] * slots.block_size
            totals[token] = slots.read(physical + at % slots.block_size).sum()
    return totals


def install(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> FakeTensorRt:
    fake = FakeTensorRt(cuda)
    monkeypatch.setitem(sys.modules, NAME, fake.module())
    return fake
