"""Reads server-sent events, whatever pieces they come in."""

from __future__ import annotations


class EventReader:
    """Gives the data of whole events; only the last, incomplete one is kept."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> list[bytes]:
        """The data of the events that `data` completes."""
        *events, self._rest = (self._rest + data.replace(b"\r\n", b"\n")).split(b"\n\n")
        return [_data(event) for event in events if event.strip()]


def _data(event: bytes) -> bytes:
    """Lines of data, joined; other fields and comments are left out."""
    lines = [line[5:] for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(line.removeprefix(b" ") for line in lines)
