"""The console script `build-engine`: compiles a checkpoint into an engine."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from octavo.tools import console, speculative_options, tensorrt_options

if TYPE_CHECKING:
    from rich.progress import TaskID

    from octavo.backends.manifest import Manifest
    from octavo.compiler import BuildConfig, BuildResult
    from octavo.compiler.stages import StageRecord

app = console.application("Compiles a Hugging Face checkpoint into a paged engine.")


@app.command()
@console.reports_errors
def build_engine(
    model: Annotated[
        str,
        typer.Option(help="A Hugging Face folder, a .gguf file, or smollm2-135m-instruct."),
    ],
    output: Annotated[Path, typer.Option(help="Folder of the engine; one there is replaced.")],
    backend: Annotated[str, typer.Option(help="What runs the engine.")] = "onnxruntime",
    dtype: Annotated[str, typer.Option(help="Of weights and activations.")] = "auto",
    quantization: Annotated[
        str, typer.Option(help="Of the linear layers' weights: none, int8 or int4.")
    ] = "none",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Of cached keys and values: auto (as --dtype), int8 or fp8.")
    ] = "auto",
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda.  [default: the first that the backend builds for]"),
    ] = None,
    compute_capabilities: Annotated[
        list[str] | None,
        typer.Option(
            "--compute-capability",
            help="Of a CUDA device, such as 8.9; repeatable.  [default: all that the backend has]",
        ),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of prompt and output.  [default: the model's]")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Sequences in one step.", show_default=False)
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens in one step.", show_default=False)
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens in one cache block.", show_default=False)
    ] = None,
    speculative: speculative_options.BuildOption = None,
    tensorrt: tensorrt_options.BuildOption = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Ignore the build cache.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code of the checkpoint.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compile a checkpoint into an engine folder, stage by stage."""
    options = {
        "backend": backend,
        "dtype": dtype,
        "quantization": quantization,
        "kv_cache_dtype": kv_cache_dtype,
        "device": device,
        "compute_capabilities": compute_capabilities,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "block_size": block_size,
        "tensorrt": tensorrt_options.tensorrt_to_build(tensorrt),
    }
    given = {name: value for name, value in options.items() if value is not None}
    config = _config(
        model=model,
        output=output,
        use_cache=not no_cache,
        trust_remote_code=trust_remote_code,
        speculative=speculative_options.drafters_to_build(speculative),
        **given,
    )

    from octavo import compiler

    started = time.perf_counter()
    with StageProgress() as progress:
        result = compiler.build_engine(config, progress)
    seconds = time.perf_counter() - started
    if as_json:
        console.print_json(_as_json(result, seconds))
    else:
        _print(result, seconds)


def _config(**options: Any) -> BuildConfig:
    """Ends with a usage error that names the option whose value the compiler refuses."""
    from pydantic import ValidationError

    from octavo.compiler import BuildConfig

    try:
        return BuildConfig.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        name = "--" + str(first["loc"][0]).replace("_", "-") if first["loc"] else "the options"
        name = " ".join([name, *(part for part in first["loc"][1:] if isinstance(part, str))])
        raise console.usage_error(f"{name}: {first['msg']} (got {first['input']!r})") from None


class StageProgress:
    """Shows a bar per stage on stderr while it is a terminal; the compiler's observer."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        terminal = Console(stderr=True, highlight=False, markup=False)
        self._progress = Progress(
            TextColumn("{task.description:<12}", markup=False),
            BarColumn(bar_width=40),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[size]}", markup=False),
            console=terminal,
            disable=not terminal.is_terminal,
            transient=True,  # the summary repeats the stages with exact times
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def started(self, name: str) -> None:
        self._tasks[name] = self._progress.add_task(name, total=None, size="")

    def advanced(self, name: str, done: int, total: int) -> None:
        self._progress.update(self._tasks[name], total=total, completed=done)

    def finished(self, record: StageRecord) -> None:
        task = self._tasks[record.name]
        self._progress.update(task, total=1, completed=1, size=_size(record))
        self._progress.stop_task(task)


def _size(record: StageRecord) -> str:
    return "" if record.size_bytes is None else console.size(record.size_bytes)


def _as_json(result: BuildResult, seconds: float) -> dict[str, Any]:
    return {
        "path": str(result.path),
        "from_cache": result.from_cache,
        "seconds": seconds,
        "stages": [
            {"name": stage.name, "seconds": stage.seconds, "size_bytes": stage.size_bytes}
            for stage in result.stages
        ],
        "total_size": sum(file.size for file in result.manifest.files),
        "backend": result.manifest.backend,
        "dtype": result.manifest.dtype,
        "quantization": result.manifest.quantization,
        "kv_cache_dtype": result.manifest.kv_cache_dtype,
        "limits": result.manifest.limits.model_dump(),
        "drafters": [drafter.model_dump() for drafter in result.manifest.drafters],
    }


def _print(result: BuildResult, seconds: float) -> None:
    manifest = result.manifest
    table = console.table("stages", "stage", "seconds>", "size>")
    for stage in result.stages:
        table.add_row(stage.name, f"{stage.seconds:.2f}", _size(stage))
    if result.stages:
        console.print_tables(table)
    total = sum(file.size for file in manifest.files)
    limits = manifest.limits
    source = "taken from the build cache" if result.from_cache else "built"
    typer.echo(
        f"{result.path}: {manifest.spec.architecture} for {manifest.backend} "
        f"in {_types(manifest)}, {console.size(total)}, {source} in {seconds:.1f} s\n"
        f"up to {limits.max_model_len} tokens a request, {limits.max_num_seqs} sequences and "
        f"{limits.max_num_batched_tokens} tokens a step, blocks of {limits.block_size}"
        + "".join(
            f"\ndrafter {drafter.method}, up to {drafter.num_speculative_tokens} tokens"
            for drafter in manifest.drafters
        )
    )


def _types(manifest: Manifest) -> str:
    named: list[str] = [manifest.dtype]
    if manifest.quantization != "none":
        named.append(f"{manifest.quantization} weights")
    if manifest.kv_cache_dtype != manifest.dtype:
        named.append(f"{manifest.kv_cache_dtype} cache")
    return " with ".join([named[0], " and ".join(named[1:])]) if named[1:] else named[0]


def main() -> None:
    app()


if __name__ == "__main__":
    main()
