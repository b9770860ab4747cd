"""Options that give a completion its form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.tools.console import usage_error

if TYPE_CHECKING:
    from octavo.runtime import StructuredOutputsParams

_PANEL = "Form of the text"

JsonSchema = Annotated[
    str | None,
    typer.Option(
        help="The text is JSON of this schema: a file, or the schema itself.",
        rich_help_panel=_PANEL,
    ),
]
Regex = Annotated[
    str | None,
    typer.Option(help="The whole text matches this expression.", rich_help_panel=_PANEL),
]
Choice = Annotated[
    list[str] | None,
    typer.Option(help="A text that the output may be; repeat it for more.", rich_help_panel=_PANEL),
]


def given(
    json_schema: str | None, regex: str | None, choice: list[str] | None
) -> StructuredOutputsParams | None:
    """What the options ask for, None if nothing; a usage error if it is wrong."""
    if json_schema is None and regex is None and not choice:
        return None
    from octavo.graphs.errors import RequestError
    from octavo.runtime import StructuredOutputsParams

    schema = None if json_schema is None else _schema(json_schema)
    try:
        return StructuredOutputsParams(json=schema, regex=regex, choice=choice or None)
    except RequestError as error:
        raise usage_error(str(error)) from None


def _schema(file_or_text: str) -> str:
    if file_or_text.lstrip().startswith("{"):
        return file_or_text
    try:
        return Path(file_or_text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise usage_error(
            f"--json-schema takes a JSON object or the path of a file with one ({error})"
        ) from None
