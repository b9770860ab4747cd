"""Where a chat reads and writes: a terminal with line editing, or pipes without decoration."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import typer

from octavo.graphs.errors import RequestError

CONTINUATION = "\\"  # at the end of a line: the message goes on in the next one


class ChatTerminal:
    """Answers go to stdout; everything else, notes and errors, goes to stderr."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        if self.interactive:
            with contextlib.suppress(ImportError):  # not in every build of Python
                import readline  # noqa: F401  # gives `input` line editing and a history

    def read(self) -> str | None:
        """The next message, of one line or several; None at the end of the input.

        RequestError if it is not UTF-8 text.
        """
        while True:
            try:
                return self._read_message()
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                self.end_line()
                self.note("Ctrl-D or /quit ends the chat")

    def say(self, text: str) -> None:
        """Shows a piece of an answer at once."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def end_line(self) -> None:
        self.say("\n")

    def note(self, text: str) -> None:
        typer.secho(text, err=True, dim=True)

    def error(self, error: Exception) -> None:
        typer.echo(f"error: {error}", err=True)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[Callable[[], bool]]:
        """Yields a function that tells whether Ctrl-C was pressed meanwhile.

        An exception in the middle of a step could leave the engine half changed, so the first
        Ctrl-C only leaves word; the second one ends the program, as the first does without a
        terminal.
        """
        pressed = False

        def leave_word(_signal: int, _frame: FrameType | None) -> None:
            nonlocal pressed
            if pressed:
                raise KeyboardInterrupt
            pressed = True

        if not self.interactive:
            yield lambda: False
            return
        before = signal.signal(signal.SIGINT, leave_word)
        try:
            yield lambda: pressed
        finally:
            signal.signal(signal.SIGINT, before)

    def _read_message(self) -> str | None:
        lines: list[str] = []
        while True:
            line = self._read_line("> " if not lines else ". ")
            if line is None:
                return "\n".join(lines) if lines else None
            if not line.endswith(CONTINUATION):
                return "\n".join([*lines, line])
            lines.append(line.removesuffix(CONTINUATION))

    def _read_line(self, prompt: str) -> str | None:
        try:
            line = input(prompt if self.interactive else "")
            line.encode()  # a terminal in another encoding leaves surrogates for its bytes
        except EOFError:
            if self.interactive:
                self.end_line()
            return None
        except UnicodeError:
            raise RequestError("the input is not UTF-8 text: convert it") from None
        return line
