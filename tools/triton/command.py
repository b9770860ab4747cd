"""`octavo export-triton`: a model repository for Triton Inference Server."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.graphs.errors import OctavoError
from octavo.tools import options, speculative_options
from octavo.tools.console import reports_errors

_REPOSITORY = "Repository"


@reports_errors
def export_triton(
    engine: Annotated[Path, typer.Argument(help="Engine folder.")],
    output: Annotated[
        Path,
        typer.Option(
            help="The model repository; a further model is added to it.",
            rich_help_panel=_REPOSITORY,
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the model.  [default: the engine folder's]", rich_help_panel=_REPOSITORY
        ),
    ] = None,
    instances: Annotated[
        int,
        typer.Option(
            min=1,
            help="Engines that share the requests, each with a process and a cache of its own.",
            rich_help_panel=_REPOSITORY,
        ),
    ] = 1,
    copy_engine: Annotated[
        bool,
        typer.Option(
            "--copy-engine/--link",
            help="Copy the engine into the repository, or name the folder where it is.",
            rich_help_panel=_REPOSITORY,
        ),
    ] = True,
    python: Annotated[
        str,
        typer.Option(
            help="The interpreter on the server that has Octavo.",
            rich_help_panel=_REPOSITORY,
            show_default="this one",
        ),
    ] = sys.executable,
    max_open_requests: Annotated[
        int,
        typer.Option(
            min=1,
            help="Requests that run or wait in one instance; more are refused.",
            rich_help_panel=options.ENGINE,
        ),
    ] = 1024,
    kv_cache_memory: options.KVCacheMemory = options.DEFAULT_KV_CACHE_MEMORY,
    num_threads: options.NumThreads = None,
    scheduling_policy: Annotated[
        str,
        typer.Option(
            help="fcfs, or priority: requests of a lower `priority` run first.",
            rich_help_panel=options.ENGINE,
        ),
    ] = "fcfs",
    speculative: speculative_options.ServeOption = None,
) -> None:
    """Write a model repository that Triton Inference Server loads, or add a model to one."""
    from octavo.backends.bundle import read_manifest
    from octavo.runtime.capacity import resolve_limits
    from octavo.runtime.speculation import options as speculation
    from octavo.runtime.step_budget import SchedulingOptions
    from octavo.tools.triton.repository import write_model
    from octavo.tools.triton.stub.settings import Settings

    engine_options: dict[str, Any] = {
        "kv_cache_memory": kv_cache_memory,
        "scheduling_policy": scheduling_policy,
        **options.given(num_threads=num_threads),
        **options.given(speculative=speculative_options.drafters_to_use(speculative)),
    }
    # What the server would only find when it loads the model.
    manifest = read_manifest(engine)
    speculation.resolve(engine_options.get("speculative"), manifest)
    SchedulingOptions(policy=engine_options["scheduling_policy"])
    resolve_limits(
        manifest,
        kv_cache_memory=kv_cache_memory,
        num_kv_blocks=None,
        max_num_seqs=None,
        max_num_batched_tokens=None,
    )
    note = _check_python(python)
    settings = Settings(
        engine=str(engine.resolve()),
        python=python,
        engine_options=engine_options,
        max_open_requests=max_open_requests,
    )
    model = write_model(
        output,
        engine.resolve().name if name is None else name,
        settings,
        instances=instances,
        copy_engine=copy_engine,
    )
    typer.echo(f"{model} is ready: {output / 'README.md'} says how to serve it")
    if note is not None:
        typer.echo(note, err=True)


def _check_python(python: str) -> str | None:
    """A note where it cannot be tried; OctavoError if it is here and has no Octavo."""
    if shutil.which(python) is None:
        return f"note: {python} is not on this machine: it must have Octavo where the server runs"
    if python == sys.executable:
        return None
    command = [python, "-P", "-c", "import octavo.tools.triton.engine_child"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise OctavoError(
            f"{python} cannot run Octavo's engines ({last}): "
            "install Octavo there or name another --python"
        )
    return None
