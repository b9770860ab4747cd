"""The plugin as TensorRT meets it while it builds, and the file of its measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.backends.tensorrt import plugin
from octavo.backends.tensorrt.timing_cache import timing_cache
from octavo.graphs.errors import BackendError, BuildError
from octavo.graphs.ops.paged_attention import SCHEMA
from tests.backend import fake_tensorrt
from tests.backend.fake_cuda import FakeCuda
from tests.backend.fake_tensorrt import DataType, FakeTensorRt, PluginField, TensorFormat

GIVEN = {"scale": 0.125, "causal": 1, "sliding_window": 24, "softcap": 2.5, "k_transposed": 0}
INT32, FLOAT, HALF, BF16, FP8 = (
    DataType[name] for name in ("INT32", "FLOAT", "HALF", "BF16", "FP8")
)


class Description:
    """A `DynamicPluginTensorDesc`, as far as formats go."""

    def __init__(self, dtype: Any, layout: Any = TensorFormat.LINEAR) -> None:
        self.desc = fake_tensorrt.TensorDesc((), dtype, layout)


def created(fields: dict[str, float]) -> Any:
    fake = FakeTensorRt(FakeCuda())
    plugin.register(fake.module())
    creator = fake.registry.creators["octavo::PagedAttention"]
    return creator.create_plugin("layer", [fake_tensorrt._field(*one) for one in fields.items()], 0)


def types(dtype: Any, cache: Any) -> list[Description]:
    inputs = [dtype, dtype, dtype, cache, INT32, INT32, INT32, INT32, FLOAT, FLOAT]
    return [Description(one) for one in (*inputs, dtype, cache)]


def supported(descriptions: list[Description]) -> list[int]:
    """Positions of inputs and outputs that the plugin does not take."""
    made = created(GIVEN)
    return [
        position
        for position in range(len(descriptions))
        if not made.supports_format_combination(position, descriptions, len(SCHEMA.inputs))
    ]


@pytest.mark.parametrize(
    ("dtype", "cache"),
    [(FLOAT, FLOAT), (HALF, HALF), (BF16, BF16), (HALF, FP8), (BF16, FP8)],
)
def test_types_it_takes(dtype: Any, cache: Any) -> None:
    assert supported(types(dtype, cache)) == []


@pytest.mark.parametrize(
    ("position", "dtype", "refused"),
    [
        (0, INT32, [0, 1, 2, 3, 10]),  # what must have the query's type is wrong as well
        (1, FLOAT, [1]),
        (3, FLOAT, [3, 11]),
        (4, FLOAT, [4]),
        (8, HALF, [8]),
        (10, FLOAT, [10]),
        (11, FP8, [11]),
    ],
)
def test_types_it_refuses(position: int, dtype: Any, refused: list[int]) -> None:
    descriptions = types(HALF, HALF)
    descriptions[position] = Description(dtype)
    assert supported(descriptions) == refused


def test_other_layouts_are_refused() -> None:
    descriptions = types(HALF, HALF)
    descriptions[3] = Description(HALF, TensorFormat.CHW4)
    assert supported(descriptions) == [3]


def test_the_cache_is_its_own_output() -> None:
    made = created(GIVEN)
    assert [made.get_aliased_input(output) for output in range(made.num_outputs)] == [-1, 3]
    assert made.get_output_data_types([HALF, HALF, HALF, FP8]) == [HALF, FP8]


def test_shapes_follow_from_the_inputs() -> None:
    made = created(GIVEN)
    inputs = [["T", 8, 64], ["T", 2, 64], ["T", 2, 48], ["N", 2, 2, 16, 64]]
    attention, cache = made.get_output_shapes(inputs, [], None)
    assert attention == ["T", 8, 48]
    assert cache == ["N", 2, 2, 16, 64]


def test_attributes_survive_the_engine() -> None:
    fields = created(GIVEN).get_fields_to_serialize()
    assert plugin.attributes_of(fields) == GIVEN
    assert {field.name: field.data.dtype for field in fields} == {
        "scale": np.float32,
        "causal": np.int32,
        "sliding_window": np.int32,
        "softcap": np.float32,
        "k_transposed": np.int32,
    }


def test_an_attribute_that_is_not_given() -> None:
    field = PluginField("scale", np.ones(1, np.float32), fake_tensorrt.PluginFieldType.FLOAT32)
    with pytest.raises(BackendError, match="the node PagedAttention has no attribute causal"):
        plugin.attributes_of([field])


def test_a_plugin_of_that_name_that_is_not_ours() -> None:
    fake = FakeTensorRt(FakeCuda())
    fake.registry.creators["octavo::PagedAttention"] = object()
    with pytest.raises(BackendError, match="did not take the plugin octavo::PagedAttention"):
        plugin.register(fake.module())


def test_it_does_not_run_without_kernels() -> None:
    made = created(GIVEN)
    inputs = [fake_tensorrt.TensorDesc((1, 1, 1), HALF)] * len(SCHEMA.inputs)
    made.on_shape_change(inputs, [])  # as while it is built
    with pytest.raises(BackendError, match="runs in an engine that Octavo loaded only"):
        made.enqueue(inputs, [], [0] * len(SCHEMA.inputs), [0, 0], 0, 0)


# --- the timing cache -----------------------------------------------------------------------------


class Log:
    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []


class Config:
    """A builder's configuration whose cache is the bytes it was given and what a build adds."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.measured = b""

    def create_timing_cache(self, known: bytes) -> bytes:
        if known and not known.startswith(b"cache"):
            self._log.warnings.append("Failed to deserialize timing cache. Returning an empty one.")
            return b""
        return known

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        self.measured = cache
        return not ignore_mismatch

    def get_timing_cache(self) -> Any:
        return self

    def serialize(self) -> bytes:
        return self.measured


def test_measurements_are_kept_from_build_to_build(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "timing.cache"
    log = Log()
    config = Config(log)
    with timing_cache(config, log, str(path)):
        config.measured += b"cache one"
    with timing_cache(config, log, str(path)):
        assert config.measured == b"cache one"
        config.measured += b" two"
    assert path.read_bytes() == b"cache one two"
    assert [file.name for file in path.parent.iterdir()] == ["timing.cache"]


def test_a_damaged_file_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "timing.cache"
    path.write_bytes(b"no such thing")
    log = Log()
    with (
        pytest.raises(BuildError, match=r"timing\.cache was not taken, it is damaged"),
        timing_cache(Config(log), log, str(path)),
    ):
        pass
    assert path.read_bytes() == b"no such thing"


def test_a_failed_build_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "timing.cache"
    log = Log()
    config = Config(log)
    with pytest.raises(BuildError, match="failed"), timing_cache(config, log, str(path)):
        raise BuildError("failed")
    assert not path.exists()
