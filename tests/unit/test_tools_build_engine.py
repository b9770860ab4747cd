"""`build-engine`, with a compiler that writes an engine of the null backend."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo import compiler
from octavo.backends import null
from octavo.backends.bundle import read_manifest
from octavo.backends.manifest import Limits
from octavo.compiler import BuildConfig, BuildResult
from octavo.compiler.config import SpeculativeConfig
from octavo.compiler.stages import StageObserver, Stages
from octavo.graphs.errors import CheckpointError
from octavo.tools.build_engine import app


class FakeCompiler:
    """Runs two stages, of which only the second knows its size."""

    def __init__(self) -> None:
        self.configs: list[BuildConfig] = []

    def build_engine(
        self, config: BuildConfig, observer: StageObserver | None = None
    ) -> BuildResult:
        self.configs.append(config)
        if config.model == "missing":
            raise CheckpointError("missing is no checkpoint: give a folder")
        stages = Stages(observer)
        with stages.stage("capture") as stage:
            stage.advance(1, 2)
        with stages.stage("lower") as stage:
            limits = Limits(
                max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, block_size=8
            )
            null.write_engine(config.output, vocab_size=97, limits=limits)
            stage.size = 3 << 20
        return BuildResult(
            path=config.output,
            manifest=read_manifest(config.output),
            stages=stages.records,
            from_cache=False,
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    made = FakeCompiler()
    monkeypatch.setattr(compiler, "build_engine", made.build_engine)
    return made


def test_json_is_one_object_and_nothing_else(fake: FakeCompiler, tmp_path: Path) -> None:
    output = tmp_path / "engine"
    result = CliRunner().invoke(app, ["--model", "m", "--output", str(output), "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    shown = json.loads(result.stdout)
    assert shown["path"] == str(output)
    assert shown["from_cache"] is False
    assert [(stage["name"], stage["size_bytes"]) for stage in shown["stages"]] == [
        ("capture", None),
        ("lower", 3145728),
    ]
    assert 0 <= sum(stage["seconds"] for stage in shown["stages"]) <= shown["seconds"]
    assert shown["total_size"] == (output / "model.null").stat().st_size
    assert shown["limits"]["max_num_batched_tokens"] == 32
    assert len(fake.configs) == 1


def test_the_summary_names_stages_sizes_and_limits(fake: FakeCompiler, tmp_path: Path) -> None:
    output = tmp_path / "engine"
    result = CliRunner().invoke(app, ["--model", "m", "--output", str(output)])
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert any(line[:1] == ["lower"] and line[-2:] == ["3.0", "MiB"] for line in lines)
    assert f"{output}: NullForCausalLM for null in float32" in result.stdout
    assert "up to 64 tokens a request, 4 sequences and 32 tokens a step" in result.stdout
    assert len(fake.configs) == 1


def test_every_option_reaches_the_compiler(fake: FakeCompiler, tmp_path: Path) -> None:
    output = tmp_path / "engine"
    options = ["--backend=null", "--dtype=float32", "--max-model-len=100", "--max-num-seqs=3"]
    options += ["--quantization=int4", "--kv-cache-dtype=int8"]
    options += ["--max-num-batched-tokens=50", "--block-size=8"]
    options += ["--no-cache", "--trust-remote-code", "--json"]
    result = CliRunner().invoke(app, ["--model", "m", "--output", str(output), *options])
    assert result.exit_code == 0
    (config,) = fake.configs
    assert (
        config.model_dump()
        | {
            "model": "m",
            "output": output,
            "backend": "null",
            "dtype": "float32",
            "quantization": "int4",
            "kv_cache_dtype": "int8",
            "max_model_len": 100,
            "max_num_seqs": 3,
            "max_num_batched_tokens": 50,
            "block_size": 8,
            "use_cache": False,
            "trust_remote_code": True,
        }
        == config.model_dump()
    )


def test_options_left_out_take_the_compilers_defaults(fake: FakeCompiler, tmp_path: Path) -> None:
    output = tmp_path / "engine"
    CliRunner().invoke(app, ["--model", "m", "--output", str(output)])
    assert fake.configs == [BuildConfig(model="m", output=output)]


def test_a_refused_checkpoint_is_one_sentence(fake: FakeCompiler, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--model", "missing", "--output", str(tmp_path / "engine")])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: missing is no checkpoint: give a folder\n"
    assert len(fake.configs) == 1


@pytest.mark.parametrize("option", ["--block-size", "--max-num-seqs", "--max-model-len"])
def test_a_value_out_of_range_is_wrong_usage(
    fake: FakeCompiler, tmp_path: Path, option: str
) -> None:
    result = CliRunner().invoke(app, ["--model", "m", "--output", str(tmp_path), option, "0"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {option}: ")
    assert result.stderr.count("\n") == 1
    assert fake.configs == []


@pytest.mark.parametrize("option", ["--quantization", "--kv-cache-dtype"])
def test_an_unknown_kind_of_integers_is_wrong_usage(
    fake: FakeCompiler, tmp_path: Path, option: str
) -> None:
    result = CliRunner().invoke(app, ["--model", "m", "--output", str(tmp_path), option, "int3"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {option}: ")
    assert result.stderr.endswith("(got 'int3')\n")
    assert fake.configs == []


@pytest.mark.parametrize("option", ["--quantization=int8", "--kv-cache-dtype=int8"])
def test_integers_need_float32_around_them(fake: FakeCompiler, tmp_path: Path, option: str) -> None:
    options = ["--model", "m", "--output", str(tmp_path), "--dtype=bfloat16", option]
    result = CliRunner().invoke(app, options)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"error: {option.replace('=', ' ')} computes in float32 around its integers, not in "
        "bfloat16: leave --dtype out\n"
    )
    assert fake.configs == []


def test_model_and_output_are_required() -> None:
    result = CliRunner().invoke(app, ["--model", "m"])
    assert result.exit_code == 2
    assert "--output" in result.stderr


def test_drafters_reach_the_compiler(fake: FakeCompiler, tmp_path: Path) -> None:
    options = ["--model", "m", "--output", str(tmp_path / "engine")]
    options += ["--speculative", "ngram,num_speculative_tokens=8,prompt_lookup_max=4"]
    options += ["--speculative", "method=eagle3,model=head,quantization=none"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.stderr
    (config,) = fake.configs
    assert config.speculative == (
        SpeculativeConfig(method="ngram", num_speculative_tokens=8, prompt_lookup_max=4),
        SpeculativeConfig(method="eagle3", model="head", quantization="none"),
    )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("method=ngram,k=4", "--speculative has no key 'k': choose from method, model, "),
        ("num_speculative_tokens=4", "names no method: add method=NAME"),
        ("method=ngram,method=eagle", "names method twice"),
        ("ngram,4", "'4' is no key=value"),
        ("method=telepathy", "--speculative method: "),
        ("method=ngram,num_speculative_tokens=33", "--speculative num_speculative_tokens: "),
    ],
)
def test_a_drafter_that_is_no_drafter_is_wrong_usage(
    fake: FakeCompiler, tmp_path: Path, given: str, sentence: str
) -> None:
    options = ["--model", "m", "--output", str(tmp_path / "engine"), "--speculative", given]
    result = CliRunner().invoke(app, options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert fake.configs == []


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("method=eagle", "--speculative method=eagle needs model=CHECKPOINT"),
        ("method=mtp,model=x", "--speculative method=mtp has no checkpoint of its own"),
        ("method=eagle,model=x,prompt_lookup_min=2", "are options of method=ngram"),
    ],
)
def test_a_drafter_that_does_not_fit_together_is_refused(
    fake: FakeCompiler, tmp_path: Path, given: str, sentence: str
) -> None:
    options = ["--model", "m", "--output", str(tmp_path / "engine"), "--speculative", given]
    result = CliRunner().invoke(app, options)
    assert (result.exit_code, result.stdout) == (1, "")
    assert sentence in result.stderr
    assert fake.configs == []


def test_a_method_is_named_once(fake: FakeCompiler, tmp_path: Path) -> None:
    options = ["--model", "m", "--output", str(tmp_path / "engine")]
    options += ["--speculative", "ngram", "--speculative", "ngram"]
    result = CliRunner().invoke(app, options)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "names method=ngram twice" in result.stderr
