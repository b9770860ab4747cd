"""`build-engine --tensorrt`, up to the configuration and the key of the build cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo import compiler
from octavo.backends import registry
from octavo.backends.base import TensorRtOptions
from octavo.compiler import BuildConfig
from octavo.compiler.config import TensorRtConfig
from octavo.graphs.errors import BuildError
from octavo.tools.build_engine import app


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[BuildConfig]:
    """What a compiler that refuses everything was asked for."""
    asked: list[BuildConfig] = []

    def refuse(config: BuildConfig, observer: Any = None) -> None:
        asked.append(config)
        raise BuildError("enough")

    monkeypatch.setattr(compiler, "build_engine", refuse)
    return asked


def invoke(given: str, backend: str = "tensorrt_rtx") -> Any:
    options = ["--model=m", "--output=e", f"--backend={backend}", "--tensorrt", given]
    return CliRunner().invoke(app, options)


def test_every_option_reaches_the_compiler(configs: list[BuildConfig]) -> None:
    given = "builder_optimization_level=5,workspace_mib=64,weight_streaming=true,timing_cache=a/t"
    result = invoke(given, backend="tensorrt")
    assert result.stderr == "error: enough\n"
    (config,) = configs
    assert config.tensorrt == TensorRtConfig(
        builder_optimization_level=5,
        workspace_mib=64,
        weight_streaming=True,
        timing_cache=Path("a/t"),
    )
    assert config.tensorrt.options == TensorRtOptions(
        builder_optimization_level=5,
        workspace_mib=64,
        weight_streaming=True,
        timing_cache=str(Path.cwd() / "a/t"),
    )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("level=3", "--tensorrt has no key 'level': choose from builder_optimization_level, "),
        ("weight_streaming", "'weight_streaming' is no key=value"),
        ("workspace_mib=1,workspace_mib=2", "--tensorrt names workspace_mib twice"),
        ("builder_optimization_level=6", "--tensorrt builder_optimization_level: "),
        ("workspace_mib=0", "--tensorrt workspace_mib: "),
        ("weight_streaming=perhaps", "--tensorrt weight_streaming: "),
    ],
)
def test_a_wrong_option_is_wrong_usage(
    configs: list[BuildConfig], given: str, sentence: str
) -> None:
    result = invoke(given)
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert configs == []


def test_other_backends_refuse_them(configs: list[BuildConfig]) -> None:
    result = invoke("workspace_mib=64", backend="onnxruntime")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "error: --tensorrt has options of the backends tensorrt and tensorrt_rtx, not of "
        "onnxruntime: leave it out\n"
    )
    assert configs == []


def test_a_cache_of_fp8_is_theirs_too(configs: list[BuildConfig]) -> None:
    options = ["--model=m", "--output=e", "--kv-cache-dtype=fp8", "--dtype=bfloat16"]
    CliRunner().invoke(app, [*options, "--backend=tensorrt"])
    (config,) = configs
    assert config.cache_dtype == "float8_e4m3fn"
    for name in ("tensorrt", "tensorrt_rtx"):
        registry.get(name).require(config.kind(("cuda",)), 16)
    for name in ("onnxruntime", "torch_tensorrt"):
        with pytest.raises(BuildError, match=f"the {name} backend has no kernel for --kv-cache-dt"):
            registry.get(name).require(config.kind(("cuda",)), 16)


def test_rtx_has_no_timing_cache(configs: list[BuildConfig]) -> None:
    result = invoke("timing_cache=t")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "timing_cache is of tensorrt alone, TensorRT-RTX measures no kernels" in result.stderr
    assert configs == []
