"""The console script `octavo`; each command lives in its own module."""

from __future__ import annotations

from octavo.tools.backends import backends
from octavo.tools.bench.command import app as bench
from octavo.tools.chat import chat
from octavo.tools.console import application
from octavo.tools.diff import diff
from octavo.tools.generate import generate
from octavo.tools.inspect_engine import inspect
from octavo.tools.options import GroupedCommand
from octavo.tools.server.command import serve
from octavo.tools.train_drafter import train_drafter
from octavo.tools.triton.command import export_triton
from octavo.tools.verify import verify

app = application("Runs and examines the engines that `build-engine` makes.")
app.command(cls=GroupedCommand)(generate)
app.command(cls=GroupedCommand)(chat)
app.command(cls=GroupedCommand)(serve)
app.command()(inspect)
app.command()(verify)
app.command()(diff)
app.command()(backends)
app.command("train-drafter")(train_drafter)
app.command("export-triton", cls=GroupedCommand)(export_triton)
app.add_typer(bench, name="bench")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
