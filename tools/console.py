"""What every command shares: errors as one sentence on stderr, JSON and tables on stdout."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec

import typer

from octavo.graphs.errors import OctavoError

if TYPE_CHECKING:
    from rich.table import Table

P = ParamSpec("P")
# What the extra `build` installs and a machine that only serves need not have.
BUILD_LIBRARIES = {
    "torch",
    "transformers",
    "onnx",
    "onnx-ir",
    "safetensors",
    "gguf",
    "accelerate",
}


def application(help_text: str) -> typer.Typer:
    """A typer application with plain messages: usage errors exit with 2."""
    return typer.Typer(
        help=help_text,
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


def reports_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Ends a command with exit code 1 and one sentence on stderr when Octavo refuses something."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except OctavoError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
        except ModuleNotFoundError as error:
            library = (error.name or "").partition(".")[0]
            if library not in BUILD_LIBRARIES:
                raise
            typer.echo(
                f"error: this needs {library}, which is not installed: install `octavo[build]`",
                err=True,
            )
            raise typer.Exit(1) from None

    return wrapper


def usage_error(message: str) -> typer.Exit:
    """Says what is wrong with the command line; raise the result, it exits with code 2."""
    typer.echo(f"error: {message}", err=True)
    return typer.Exit(2)


def print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")


def table(title: str, *columns: str) -> Table:
    """An empty table; the columns whose name ends with `>` are aligned to the right."""
    from rich import box
    from rich.table import Table

    result = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        right = column.endswith(">")
        result.add_column(column.rstrip(">"), justify="right" if right else "left", overflow="fold")
    return result


def print_tables(*tables: Table, stderr: bool = False) -> None:
    """Prints to stdout (or stderr), at full width where that is a file or a pipe."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, stderr=stderr)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, stderr=stderr, width=160)
    for shown in tables:
        console.print(shown)


def one_line(text: str, width: int = 60) -> str:
    """A text for a table: line ends are written out, what is too long is cut."""
    line = text.replace("\n", "\\n")
    return line if len(line) <= width else line[: width - 3] + "..."


def size(num_bytes: int) -> str:
    """`num_bytes` for people: 512 B, 1.5 KiB, 513.1 MiB."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
