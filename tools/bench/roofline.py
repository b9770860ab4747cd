"""`python -m octavo.tools.bench.roofline`: how near engines come to the limits of their device.

Decoding reads every weight and every cached key and value once a step, so it is compared with the
rate at which the device copies memory; prefill multiplies matrices, so it is compared with one
large product. Both limits are measured in the same run, by PyTorch, in the engine's type. What a
step takes is what a user waits for: copies of its inputs and of its logits count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from octavo.backends.base import EngineKind, Executable, LoadOptions
from octavo.backends.manifest import Limits
from octavo.graphs.errors import OctavoError
from octavo.graphs.spec import Device, FloatDType, ModelSpec
from octavo.tools import console
from octavo.tools.bench.kernel_session import seconds_of
from octavo.tools.bench.step_costs import Model, Step

if TYPE_CHECKING:
    import torch

COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
PRODUCT_SIZE = {"cpu": 2048, "cuda": 8192}
CONTEXT = 512
PREFILL = 2048
DECODES = (1, 8, 32)  # sequences
WARM_UP = 3  # steps, of which the second is where a decode step is captured

app = console.application("Measures engines against the limits of their device.")


@dataclass(frozen=True)
class DeviceLimits:
    bytes_per_second: float  # read and written by a copy
    flops_per_second: float  # of a matrix product, a multiply-add counting as two


STEPS = (
    *(Step(f"decode, {count} x 1 after {CONTEXT}", count, CONTEXT - 1, 1) for count in DECODES),
    Step(f"prefill, 1 x {PREFILL}", 1, 0, PREFILL),
)


@dataclass(frozen=True)
class Measured:
    backend: str
    step: str
    milliseconds: float
    tokens_per_second: float
    bandwidth_share: float
    product_share: float


@app.command()
@console.reports_errors
def roofline(
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Name of a backend; repeat it for more.  [default: all that can]"),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The checkpoint.  [default: a Llama of 1.1B, random weights]")
    ] = None,
    device: Annotated[str, typer.Option(help=f"One of {', '.join(get_args(Device))}.")] = "cuda",
    dtype: Annotated[
        str, typer.Option(help=f"One of {', '.join(get_args(FloatDType))}.")
    ] = "bfloat16",
    runs: Annotated[int, typer.Option(min=1, help="Measured steps, their median counts.")] = 20,
    root: Annotated[Path, typer.Option(help="Checkpoint and engines.")] = Path("build/roofline"),
    output: Annotated[Path | None, typer.Option(help="Also write a Markdown report.")] = None,
) -> None:
    """Print the results as JSON on stdout, and a table on stderr."""
    kind = _kind(device, dtype)
    chosen = _backends(kind, backend)
    checkpoint = model or _llama(root)
    limits = device_limits(kind)
    results: list[Measured] = []
    for name in chosen:
        typer.echo(f"{name}: building and measuring", err=True)
        try:
            results += _measure(name, checkpoint, kind, limits, runs, root)
        except OctavoError as error:  # the others are measured all the same
            typer.echo(f"{name}: {error}", err=True)
    if not results:
        raise OctavoError(f"no engine could be measured: tried {', '.join(chosen)}")
    facts = _facts(kind, checkpoint, limits)
    console.print_json({**facts, "results": [asdict(result) for result in results]})
    _print(results)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(markdown(facts, results), encoding="utf-8")


def _kind(device: str, dtype: str) -> EngineKind:
    for value, known, option in (
        (device, get_args(Device), "--device"),
        (dtype, get_args(FloatDType), "--dtype"),
    ):
        if value not in known:
            raise typer.BadParameter(
                f"{value!r} is not one of {', '.join(known)}", param_hint=option
            )
    checked: Any = {"device": device, "dtype": dtype, "kv_cache_dtype": dtype}
    return EngineKind(**checked)


def _backends(kind: EngineKind, wanted: Sequence[str] | None) -> list[str]:
    """Those that build and run such engines here; OctavoError where there are none."""
    from octavo.backends import registry

    chosen, reasons = [], []
    for name in wanted or [one for one in registry.names() if one not in ("torch", "null")]:
        try:
            backend = registry.get(name)
            backend.require(kind, 16)
            reason = backend.can_build(kind).reason or backend.can_run(kind.device).reason
        except OctavoError as error:
            reason = str(error)
        if reason is None:
            chosen.append(name)
        else:
            reasons.append(f"{name}: {reason}")
            typer.echo(reasons[-1], err=True)
    if not chosen:
        raise OctavoError(f"no backend builds and runs such engines here ({'; '.join(reasons)})")
    return chosen


def _llama(root: Path) -> str:
    from octavo.tools.bench.peers import checkpoints
    from octavo.tools.bench.peers.catalog import LLAMA

    folder = root / LLAMA
    checkpoints.ensure(LLAMA, folder)
    return str(folder)


def device_limits(kind: EngineKind) -> DeviceLimits:
    """As fast as PyTorch copies and multiplies on the device; the best of ten counts."""
    import torch

    element = getattr(torch, kind.dtype)
    source = torch.zeros(COPY_BYTES[kind.device], dtype=torch.uint8, device=kind.device)
    target = torch.empty_like(source)
    size = PRODUCT_SIZE[kind.device]
    matrix = torch.randn(size, size, device=kind.device).to(element)
    product = torch.empty_like(matrix)
    copy = _best(lambda: target.copy_(source), torch, kind.device)
    multiply = _best(lambda: torch.mm(matrix, matrix, out=product), torch, kind.device)
    return DeviceLimits(2 * source.nbytes / copy, 2 * size**3 / multiply)


def _best(function: Callable[[], torch.Tensor], library: Any, device: Device) -> float:
    def run() -> None:
        function()
        if device == "cuda":
            library.cuda.synchronize()

    run()
    return min(seconds_of(run, 10))


def _measure(
    name: str, checkpoint: str, kind: EngineKind, limits: DeviceLimits, runs: int, root: Path
) -> list[Measured]:
    from octavo.backends import registry
    from octavo.backends.bundle import read_manifest
    from octavo.compiler.build import build_engine
    from octavo.compiler.config import BuildConfig

    config = BuildConfig(
        model=checkpoint,
        output=root / "-".join([Path(checkpoint).name, name, kind.device, kind.dtype]),
        backend=name,
        device=kind.device,
        dtype=kind.dtype,
        max_model_len=PREFILL,
        max_num_batched_tokens=PREFILL,
        max_num_seqs=max(DECODES),
    )
    path = build_engine(config).path
    manifest = read_manifest(path)
    executable = registry.get(name).load(path, manifest, LoadOptions())
    try:
        return [
            measure_step(name, executable, manifest.spec, manifest.limits, kind, step, limits, runs)
            for step in STEPS
        ]
    finally:
        executable.close()


def measure_step(
    name: str,
    executable: Executable,
    spec: ModelSpec,
    engine: Limits,
    kind: EngineKind,
    step: Step,
    limits: DeviceLimits,
    runs: int,
) -> Measured:
    inputs = step.inputs(spec.sampled_vocab_size, engine.block_size)
    executable.allocate_kv_cache(step.sequences * step.blocks_per_sequence(engine.block_size))
    for _ in range(WARM_UP):
        executable.run(inputs)
    seconds = statistics.median(seconds_of(lambda: executable.run(inputs), runs))
    model = Model.of(spec, kind.dtype)
    return Measured(
        name,
        step.name,
        milliseconds=1e3 * seconds,
        tokens_per_second=step.rows / seconds,
        bandwidth_share=step.bytes_read(model) / seconds / limits.bytes_per_second,
        product_share=step.flops(model) / seconds / limits.flops_per_second,
    )


def _facts(kind: EngineKind, checkpoint: str, limits: DeviceLimits) -> dict[str, Any]:
    import torch

    name = torch.cuda.get_device_name() if kind.device == "cuda" else "CPU"
    return {
        "device": name,
        "checkpoint": Path(checkpoint).name,
        "dtype": kind.dtype,
        "measured": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "copy_gb_per_second": limits.bytes_per_second / 1e9,
        "product_tflops": limits.flops_per_second / 1e12,
    }


HEADER = ("backend", "step", "ms>", "tokens/s>", "of the copy>", "of the product>")


def _cells(result: Measured) -> list[str]:
    return [
        result.backend,
        result.step,
        f"{result.milliseconds:.2f}",
        f"{result.tokens_per_second:.0f}",
        f"{result.bandwidth_share:.0%}",
        f"{result.product_share:.0%}",
    ]


def _print(results: Sequence[Measured]) -> None:
    table = console.table("medians", *HEADER)
    for result in results:
        table.add_row(*_cells(result))
    console.print_tables(table, stderr=True)


def markdown(facts: dict[str, Any], results: Sequence[Measured]) -> str:
    from octavo.tools.bench.peers.report import table

    return f"""\
# Engines beside the limits of their device

`make test-gpu` writes this file. Device: {facts["device"]}. Checkpoint: {facts["checkpoint"]}, in
{facts["dtype"]}. Measured {facts["measured"]}. In the same run, PyTorch copied memory at
{facts["copy_gb_per_second"]:.0f} GB/s (read and written) and multiplied matrices at
{facts["product_tflops"]:.3g} TFLOP/s.

{table(HEADER, [_cells(result) for result in results])}
A step's time includes the copies of its inputs and of its logits. Its share of the copy counts the
weights and the keys and values that it has to read; its share of the product counts the
multiplications that it has to do.
"""


if __name__ == "__main__":
    app()
