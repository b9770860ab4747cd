"""Serves a driver over JSON lines: `python -P serve.py DRIVER.py`.

Runs in a peer's own environment, so it needs only NumPy and the standard library. The driver file
holds a class `Driver`:

    prepare(model: str, output: str, options: dict) -> None     static: checkpoint -> artefact
    versions() -> dict[str, str]                                static, optional: beside pip's
    __init__(artefact: str, num_threads: int, options: dict)
    generate(prompts: [B, P] ints, max_tokens: int) -> (seconds, [B, max_tokens] ints)
    logits(token_ids: [T]) -> [T, V] floats                     or, where only some are reachable:
    score(token_ids: [T]) -> ([T-1] natural log-probabilities of the next token, [T-1] best tokens)

Requests are objects with an `op` and its arguments, answers are {"ok": true, "result": ...} or
{"ok": false, "error": "..."}.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, TextIO

import numpy as np

CHUNK = 128  # rows of logits that are turned into float64 at once


def score(logits: Any, token_ids: list[int]) -> tuple[list[float], list[int]]:
    """Of rows [T, V]: the log-probability of every next token, and the most probable one."""
    log_probabilities: list[float] = []
    best: list[int] = []
    for start in range(0, len(token_ids) - 1, CHUNK):
        targets = np.asarray(token_ids[start + 1 : start + 1 + CHUNK])
        rows = np.asarray(logits[start : start + len(targets)], np.float64)
        top = rows.max(axis=1)
        chosen = rows[np.arange(len(targets)), targets]
        total = top + np.log(np.exp(rows - top[:, None]).sum(axis=1))
        log_probabilities += (chosen - total).tolist()
        best += rows.argmax(axis=1).tolist()
    return log_probabilities, best


class Server:
    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._loaded: Any = None

    def versions(self) -> dict[str, str]:
        describe: Callable[[], dict[str, str]] | None = getattr(self._driver, "versions", None)
        return describe() if describe else {}

    def prepare(self, model: str, output: str, options: dict[str, Any]) -> None:
        self._driver.prepare(model, output, options)

    def load(self, artefact: str, num_threads: int, options: dict[str, Any]) -> None:
        self._loaded = self._driver(artefact, num_threads, options)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        seconds, token_ids = self._loaded.generate(prompts, max_tokens)
        return {"seconds": seconds, "token_ids": [[int(i) for i in row] for row in token_ids]}

    def score(self, token_ids: list[int]) -> dict[str, Any]:
        if hasattr(self._loaded, "score"):
            log_probabilities, best = self._loaded.score(token_ids)
        else:
            log_probabilities, best = score(self._loaded.logits(token_ids), token_ids)
        return {"log_probabilities": log_probabilities, "best": best}


OPERATIONS = ("versions", "prepare", "load", "generate", "score")


def answer(server: Server, line: str) -> dict[str, Any]:
    try:
        request = json.loads(line)
        operation = request.pop("op")
        if operation not in OPERATIONS:
            raise ValueError(f"there is no operation {operation!r}: {', '.join(OPERATIONS)}")
        return {"ok": True, "result": getattr(server, operation)(**request)}
    except Exception as error:
        traceback.print_exc()
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}


def serve(server: Server, requests: Iterable[str], answers: TextIO) -> None:
    for line in requests:
        answers.write(json.dumps(answer(server, line)) + "\n")
        answers.flush()


def main() -> None:
    # Libraries print to standard output: they get standard error instead.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(Server(runpy.run_path(sys.argv[1])["Driver"]), sys.stdin, answers)


if __name__ == "__main__":
    main()
