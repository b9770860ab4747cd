"""Options that several commands share, and help that lists them under headings."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

PROMPTS = "Prompts"
SAMPLING = "Sampling"
STOPPING = "Stopping"
OUTPUT = "Output"
ENGINE = "Engine"

_Value = TypeVar("_Value")

# None stands for the default of `SamplingParams`, which changes nothing.
EngineArgument = Annotated[
    str, typer.Argument(help="Engine folder, or a checkpoint to build first.")
]
Temperature = Annotated[
    float,
    typer.Option(
        help="0 always takes the likeliest token, 1 samples as the model predicts.",
        rich_help_panel=SAMPLING,
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Sample from the likeliest tokens that have this probability together; 1: from all.",
        rich_help_panel=SAMPLING,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        help="Sample from this many likeliest tokens; 0: from all.", rich_help_panel=SAMPLING
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Sample from tokens at least this likely, relative to the likeliest; 0: from all.",
        rich_help_panel=SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        help="Above 1 makes tokens of prompt and output less likely; 1: no change.",
        rich_help_panel=SAMPLING,
    ),
]
Seed = Annotated[
    int | None, typer.Option(help="Makes sampling repeatable.", rich_help_panel=SAMPLING)
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="A text that ends the output; repeatable.", rich_help_panel=STOPPING),
]
KVCacheMemory = Annotated[
    str, typer.Option(help="Memory of the paged cache.", rich_help_panel=ENGINE)
]
NumThreads = Annotated[
    int | None, typer.Option(min=1, help="Default: all cores.", rich_help_panel=ENGINE)
]

DEFAULT_KV_CACHE_MEMORY = "512MiB"


class GroupedCommand(TyperCommand):
    """Lists the options under the headings of their help panels, plainly, as messages are."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        others: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                sections.setdefault("Arguments", []).append(record)
            elif heading := getattr(parameter, "rich_help_panel", None):
                sections.setdefault(heading, []).append(record)
            else:
                others.append(record)
        for heading, records in [*sections.items(), ("Other", others)]:
            with formatter.section(heading):
                formatter.write_dl(records)


def given(**options: _Value | None) -> dict[str, _Value]:
    """The options that have a value."""
    return {name: value for name, value in options.items() if value is not None}
