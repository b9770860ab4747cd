"""`octavo inspect`: what is in an engine and where it runs."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.backends import bundle, registry
from octavo.graphs.errors import BackendError
from octavo.graphs.ops.quantization import GROUP
from octavo.tools import console

if TYPE_CHECKING:
    from rich.table import Table

    from octavo.backends.base import Compatibility
    from octavo.backends.manifest import BindingRecord, Manifest
    from octavo.graphs.spec import AttentionSpec


@console.reports_errors
def inspect(
    engine: Annotated[Path, typer.Argument(help="Engine folder.")],
    check: Annotated[
        bool, typer.Option("--check", help="Also compare every file with its SHA-256.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show an engine's model, limits, profiles, passes, versions and files."""
    manifest = bundle.read_manifest(engine)
    compatibility = _compatibility(manifest)
    if check:
        bundle.verify_files(engine, manifest.files)
    if as_json:
        console.print_json(_as_json(manifest, compatibility, check))
    else:
        console.print_tables(*_tables(engine, manifest, compatibility, check))


def _compatibility(manifest: Manifest) -> Compatibility:
    from octavo.backends.base import Compatibility

    try:
        return registry.get(manifest.backend).check(manifest)
    except BackendError as error:
        return Compatibility(str(error))


def _as_json(manifest: Manifest, compatibility: Compatibility, checked: bool) -> dict[str, Any]:
    return {
        "manifest": manifest.model_dump(mode="json"),
        "num_layers": len(manifest.spec.layers),
        "total_size": sum(file.size for file in manifest.files),
        "cache_block_bytes": manifest.cache_block_bytes,
        "runs_here": compatibility.ok,
        "reason": compatibility.reason,
        "hashes_checked": checked,
    }


def _tables(
    engine: Path, manifest: Manifest, compatibility: Compatibility, checked: bool
) -> list[Table]:
    tables = [
        _overview(engine, manifest, compatibility),
        _limits(manifest),
        _profiles(manifest),
        _passes(manifest),
        _bindings(manifest),
        _versions(manifest),
        _files(manifest, checked),
    ]
    return [table for table in tables if table.row_count]


def _overview(engine: Path, manifest: Manifest, compatibility: Compatibility) -> Table:
    spec, target = manifest.spec, manifest.target
    features = [*target.cpu_features, *target.compute_capabilities]
    table = console.table(str(engine), "what", "value")
    for what, value in {
        "model": f"{spec.architecture}, {spec.num_parameters / 1e6:,.1f} M parameters",
        "attention": "; ".join(
            f"{count} layers of {text}"
            for text, count in Counter(_attention(layer) for layer in spec.layers).items()
        ),
        "vocabulary": f"{spec.vocab_size:,} tokens, end of text {list(spec.eos_token_ids)}",
        "backend": manifest.backend,
        "dtype": manifest.dtype,
        "quantization": _quantization(manifest),
        "cache": f"{manifest.kv_cache_dtype}, {manifest.kv_layout} layout, "
        f"{console.size(manifest.cache_block_bytes)} a block",
        "target": " ".join([target.architecture, *features]),
        "runs here": "yes" if compatibility.ok else f"no: {compatibility.reason}",
        "format": str(manifest.format_version),
        **_drafters(manifest),
    }.items():
        table.add_row(what, value)
    return table


def _drafters(manifest: Manifest) -> dict[str, str]:
    """A row for each drafter, with the bytes of those that are compiled."""
    rows = {}
    for drafter in manifest.drafters:
        text = f"up to {drafter.num_speculative_tokens} tokens"
        if drafter.path is not None:
            own = (file.size for file in manifest.files if file.path.startswith(drafter.path + "/"))
            text += f", {console.size(sum(own))}"
        rows[f"drafter {drafter.method}"] = text
    return rows


def _quantization(manifest: Manifest) -> str:
    weights = f"weights {manifest.quantization}"
    is_integer = manifest.quantization != "none"
    return f"{weights}, activations int8 in groups of {GROUP}" if is_integer else weights


def _attention(layer: AttentionSpec) -> str:
    heads = f"{layer.num_heads} heads, {layer.num_kv_heads} KV heads of {layer.head_dim}"
    extras = {
        f"values of {layer.value_head_dim}": layer.value_head_dim != layer.head_dim,
        f"window {layer.sliding_window}": bool(layer.sliding_window),
        f"softcap {layer.softcap:g}": bool(layer.softcap),
        "sinks": layer.has_sinks,
        "ALiBi": layer.has_alibi,
        "not causal": not layer.causal,
    }
    return ", ".join([heads, *(text for text, present in extras.items() if present)])


def _limits(manifest: Manifest) -> Table:
    table = console.table("limits", "limit", "value>")
    for name, value in manifest.limits.model_dump().items():
        table.add_row(name, f"{value:,}")
    return table


def _profiles(manifest: Manifest) -> Table:
    table = console.table("profiles (min / opt / max)", "profile", "dimensions")
    for profile in manifest.profiles:
        ranges = (f"{dim} {r.min}/{r.opt}/{r.max}" for dim, r in profile.dims.items())
        table.add_row(profile.name, "  ".join(ranges))
    return table


def _passes(manifest: Manifest) -> Table:
    """Which rewrites of the graph hit, how often, and why the others did not."""
    table = console.table("passes", "pass", "hits>", "what it did", "what it left alone, and why")
    for record in manifest.passes:
        left = list(record.skipped)
        if not record.matches and not left:
            left.append("nothing of the kind in this model")
        table.add_row(
            record.name.replace("_", " "),
            str(record.matches),
            "\n".join(record.notes),
            "\n".join(left),
        )
    return table


def _bindings(manifest: Manifest) -> Table:
    table = console.table("bindings", "", "name", "dtype", "shape")
    for direction, records in (("in", manifest.inputs), ("out", manifest.outputs)):
        # The layers' caches take one line where they are alike.
        for (_, dtype, shape), alike in groupby(records, _kind_of_binding):
            names = [record.name for record in alike]
            name = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
            table.add_row(direction, name, dtype, "[" + ", ".join(map(str, shape)) + "]")
    return table


def _kind_of_binding(record: BindingRecord) -> tuple[str, str, tuple[str | int, ...]]:
    return record.name.partition(".")[0], record.dtype, record.shape


def _versions(manifest: Manifest) -> Table:
    table = console.table("built with", "library", "version")
    for name, version in sorted(manifest.versions.items()):
        table.add_row(name, version)
    return table


def _files(manifest: Manifest, checked: bool) -> Table:
    title = "files (SHA-256 checked)" if checked else "files"
    table = console.table(title, "file", "size>", "SHA-256")
    for file in manifest.files:
        table.add_row(file.path, console.size(file.size), file.sha256[:16])
    total = sum(file.size for file in manifest.files)
    table.add_section()
    table.add_row("total", console.size(total), "")
    return table
