"""A builder's configuration: profiles, compute capabilities, and the user's options."""

from __future__ import annotations

from typing import Any

from octavo.backends.base import TensorRtOptions
from octavo.backends.tensorrt.flavour import Flavour
from octavo.backends.tensorrt.request import EngineRequest
from octavo.backends.tensorrt.step_shapes import ShapeProfile, require_ordered
from octavo.graphs.errors import BuildError

_REFUSED = -1


def configure(
    trt: Any, builder: Any, config: Any, network: Any, request: EngineRequest, flavour: Flavour
) -> None:
    """Raises BuildError naming what the library refuses."""
    # Without it an output of a plugin cannot be one of its inputs.
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    if flavour.sets_capabilities:
        _set_capabilities(trt, config, request.compute_capabilities, flavour)
    _set_options(trt, config, request.options)
    names = {network.get_input(index).name for index in range(network.num_inputs)}
    for profile in request.profiles:
        _add_profile(builder, config, profile, names, flavour)


def _set_capabilities(
    trt: Any, config: Any, capabilities: tuple[str, ...], flavour: Flavour
) -> None:
    config.num_compute_capabilities = len(capabilities)
    for index, capability in enumerate(capabilities):
        member = getattr(trt.ComputeCapability, f"SM{capability.replace('.', '')}", None)
        if member is None or not config.set_compute_capability(member, index):
            raise BuildError(
                f"{flavour.title} {trt.__version__} does not build for compute capability "
                f"{capability}: choose from {', '.join(_capabilities(trt))}"
            )


def _capabilities(trt: Any) -> list[str]:
    names = [name for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
    numbers = sorted(int(name[2:]) for name in names)
    return [f"{number // 10}.{number % 10}" for number in numbers]


def _set_options(trt: Any, config: Any, options: TensorRtOptions) -> None:
    config.builder_optimization_level = options.builder_optimization_level
    # Layers keep the names of the captured nodes, so that a profile of the engine can be read.
    config.profiling_verbosity = trt.ProfilingVerbosity.LAYER_NAMES_ONLY
    if options.workspace_mib is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mib << 20)
    if options.weight_streaming:
        config.set_flag(trt.BuilderFlag.WEIGHT_STREAMING)
    # Sums of float32 stay sums of float32.
    config.clear_flag(trt.BuilderFlag.TF32)


def _add_profile(
    builder: Any, config: Any, profile: ShapeProfile, names: set[str], flavour: Flavour
) -> None:
    require_ordered(profile)
    if set(profile.shapes) != names:
        odd = sorted(names.symmetric_difference(profile.shapes))
        raise BuildError(
            f"the profile {profile.name} and the network disagree on the input {odd[0]}: "
            "build for another backend, and report this model"
        )
    made = builder.create_optimization_profile()
    for name, bounds in profile.shapes.items():
        made.set_shape(name, *bounds)
    if config.add_optimization_profile(made) == _REFUSED:
        raise BuildError(
            f"{flavour.title} does not take the profile {profile.name} of shapes "
            f"{profile.shapes}: build with other limits"
        )
