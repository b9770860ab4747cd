"""What the user may choose of a build."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from octavo.backends.base import EngineKind, TensorRtOptions
from octavo.backends.manifest import DEFAULT_MAX_DRAFT_TOKENS, MOST_DRAFT_TOKENS, Limits
from octavo.graphs.errors import BuildError
from octavo.graphs.spec import (
    CacheDType,
    Device,
    FloatDType,
    Frozen,
    Quantization,
    SpeculativeMethod,
)

DEFAULT_MAX_NUM_SEQS = 64
DEFAULT_MAX_NUM_BATCHED_TOKENS = 1024
DEFAULT_BLOCK_SIZE = 16
TENSORRT_BACKENDS = ("tensorrt", "tensorrt_rtx")


class SpeculativeConfig(Frozen):
    """One drafter of `--speculative`, with vLLM's names.

    model   its checkpoint; none for "ngram", which needs none, and for "mtp", whose layers are in
            the model's own checkpoint
    """

    method: SpeculativeMethod
    model: str | None = None
    num_speculative_tokens: int = Field(default=4, ge=1, le=MOST_DRAFT_TOKENS)
    prompt_lookup_min: int | None = Field(default=None, ge=1, description="ngram: 2")
    prompt_lookup_max: int | None = Field(default=None, ge=1, description="ngram: 8")
    quantization: Quantization | None = Field(default=None, description="None: the model's own")

    @model_validator(mode="after")
    def _consistent(self) -> SpeculativeConfig:
        needs_model = self.method not in ("ngram", "mtp")
        if needs_model and self.model is None:
            raise BuildError(f"--speculative method={self.method} needs model=CHECKPOINT")
        if not needs_model and self.model is not None:
            raise BuildError(
                f"--speculative method={self.method} has no checkpoint of its own: "
                f"leave model={self.model} out"
            )
        if self.method != "ngram" and (self.prompt_lookup_min or self.prompt_lookup_max):
            raise BuildError(
                "prompt_lookup_min and prompt_lookup_max are options of method=ngram, "
                f"not of method={self.method}: leave them out"
            )
        return self


class TensorRtConfig(Frozen):
    """Options of `--tensorrt`, for the backends tensorrt and tensorrt_rtx.

    timing_cache  a file that keeps what TensorRT measured of kernels, read and added to;
                  TensorRT-RTX measures nothing
    """

    builder_optimization_level: int = Field(
        default=3, ge=0, le=5, description="longer builds, faster engines"
    )
    workspace_mib: int | None = Field(
        default=None, ge=1, description="device memory that a layer may use, None: all there is"
    )
    weight_streaming: bool = Field(default=False, description="weights may stay in host memory")
    timing_cache: Path | None = None

    @property
    def options(self) -> TensorRtOptions:
        cache = self.timing_cache
        return TensorRtOptions(
            builder_optimization_level=self.builder_optimization_level,
            workspace_mib=self.workspace_mib,
            weight_streaming=self.weight_streaming,
            timing_cache=None if cache is None else str(cache.expanduser().absolute()),
        )


class BuildConfig(Frozen):
    """Options of `build-engine`; `model` is an HF folder, a `.gguf` file or a packaged name."""

    model: str
    output: Path
    backend: str = "onnxruntime"
    dtype: Literal["auto"] | FloatDType = Field(default="auto", description="auto: float32")
    quantization: Quantization = Field(default="none", description="of the linear layers' weights")
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = Field(
        default="auto", description="auto: dtype; fp8: float8_e4m3fn"
    )
    device: Device | None = Field(default=None, description="None: the backend's first")
    compute_capabilities: tuple[Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]$")], ...] = Field(
        default=(),
        description="of CUDA devices, such as 8.9; none: all that the backend builds for",
    )
    max_model_len: int | None = Field(default=None, ge=2, description="None: the model's positions")
    max_num_seqs: int = Field(default=DEFAULT_MAX_NUM_SEQS, ge=1)
    max_num_batched_tokens: int = Field(default=DEFAULT_MAX_NUM_BATCHED_TOKENS, ge=1)
    block_size: int = Field(default=DEFAULT_BLOCK_SIZE, ge=1, le=256)
    speculative: tuple[SpeculativeConfig, ...] = ()
    tensorrt: TensorRtConfig = TensorRtConfig()
    use_cache: bool = True
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _float32_around_integers(self) -> BuildConfig:
        for option, is_integer in (
            (f"--quantization {self.quantization}", self.quantization != "none"),
            (f"--kv-cache-dtype {self.kv_cache_dtype}", self.kv_cache_dtype == "int8"),
        ):
            if is_integer and self.weights_dtype != "float32":
                raise BuildError(
                    f"{option} computes in float32 around its integers, not in {self.dtype}: "
                    "leave --dtype out"
                )
        return self

    @model_validator(mode="after")
    def _each_method_once(self) -> BuildConfig:
        methods = [drafter.method for drafter in self.speculative]
        for method in methods:
            if methods.count(method) > 1:
                raise BuildError(f"--speculative names method={method} twice: name each one once")
        return self

    @model_validator(mode="after")
    def _tensorrt_for_tensorrt(self) -> BuildConfig:
        if self.tensorrt != TensorRtConfig() and self.backend not in TENSORRT_BACKENDS:
            raise BuildError(
                f"--tensorrt has options of the backends {' and '.join(TENSORRT_BACKENDS)}, "
                f"not of {self.backend}: leave it out"
            )
        if self.tensorrt.timing_cache is not None and self.backend == "tensorrt_rtx":
            raise BuildError(
                "--tensorrt timing_cache is of tensorrt alone, TensorRT-RTX measures no kernels "
                "while it builds: leave it out"
            )
        return self

    @property
    def max_draft_tokens(self) -> int:
        """Of one sequence in a step of the profile verify."""
        counts = [drafter.num_speculative_tokens for drafter in self.speculative]
        return max([DEFAULT_MAX_DRAFT_TOKENS, *counts])

    def kind(self, devices: tuple[Device, ...]) -> EngineKind:
        """What is asked of a backend that builds for `devices`; BuildError if it cannot be."""
        device = self.device or devices[0]
        if device not in devices:
            raise BuildError(
                f"the {self.backend} backend does not build for the device {device}: "
                f"choose {' or '.join(devices)}, or another backend"
            )
        if self.compute_capabilities and device != "cuda":
            raise BuildError(
                f"--compute-capability {self.compute_capabilities[0]} is one of a CUDA device: "
                "add --device cuda"
            )
        return EngineKind(
            dtype=self.weights_dtype,
            kv_cache_dtype=self.cache_dtype,
            quantization=self.quantization,
            device=device,
            compute_capabilities=self.compute_capabilities,
        )

    @property
    def weights_dtype(self) -> FloatDType:
        return "float32" if self.dtype == "auto" else self.dtype

    @property
    def cache_dtype(self) -> CacheDType:
        if self.kv_cache_dtype == "auto":
            return self.weights_dtype
        return "float8_e4m3fn" if self.kv_cache_dtype == "fp8" else self.kv_cache_dtype

    def limits(self, max_positions: int) -> Limits:
        """The engine's limits for a model of `max_positions`; BuildError if it has too few."""
        length = max_positions if self.max_model_len is None else self.max_model_len
        if length > max_positions:
            raise BuildError(
                f"max_model_len {length} is more than the {max_positions} positions of "
                f"{self.model}: choose at most {max_positions}"
            )
        return Limits(
            max_model_len=length,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            block_size=self.block_size,
        )
