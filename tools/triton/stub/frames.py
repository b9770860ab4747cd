"""Messages between the stub and its engine process: JSON objects, each after its length.

    stub                                       engine process
    {"protocol": ..., "start": ...}       ->
                                          <-   {"ready": metric definitions} | {"failed": sentence}
    {"add": key, "request": ...}          ->
    {"cancel": key}                       ->
                                          <-   {"outputs": [[key, tensors, error, final], ...]}
    {"delivered": true}                   ->
                                          <-   {"metrics": snapshot, "trouble": sentence or null}
                                          <-   {"dying": sentence}

Outputs come in one message at a time: what is new meanwhile is merged into the next one, and
neither side ever holds more of a request than its output. The end of the socket is the end of both
sides' work.
"""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

# What both sides must agree on; raised whenever a message changes.
PROTOCOL = 1
LENGTH = struct.Struct(">I")
# Of one message. A prompt beyond it is refused, as no engine could take it.
MOST_BYTES = 64 << 20


def encode(message: dict[str, Any]) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return LENGTH.pack(len(body)) + body


def decode(body: bytes) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(body)
    return message


def read(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message; None at the end, be it in the middle of a message."""
    try:
        head = stream.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack(head)
        body = stream.read(size)
    except OSError:
        return None
    return None if len(body) < size else decode(body)
