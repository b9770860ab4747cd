"""The native sampler through ctypes: what `src/sampling.h` declares, for Python.

The library needs no ONNX Runtime for this. The interpreter lock is free while a call runs.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.backends import kernels

# struct SamplingRow and struct LogprobsRow
_SAMPLING_ROW = "QQQdddiI"
_LOGPROBS_ROW = "Qii"
_TOKEN_LOGPROB = np.dtype([("logprob", np.float64), ("rank", np.int64)])


class TopLogprobs(NamedTuple):
    """Of each row's token, and of its most likely tokens in descending order, row after row."""

    logprobs: list[float]
    ranks: list[int]  # from 1 on; -1 of a row that could not be sampled
    top_ids: NDArray[np.int32]  # [sum of num_logprobs]
    top_logprobs: NDArray[np.float64]  # [sum of num_logprobs]


class SamplingKernel:
    """Of the instruction set that is selected now. Raises BackendError where there is none.

    `library`: another build of the kernels than Octavo's own.

    A row's logits are given by the address of float32 [vocab_size], which must stay valid until
    the call returns, and a vocabulary has 1 .. `most_columns` tokens: nothing is checked here.
    """

    def __init__(self, library: Path | None = None) -> None:
        self._library = _load(library or kernels.library_path())
        self._kernel = self._library.octavo_sampling_kernel()
        if self._kernel is None:
            raise kernels.unknown_instruction_set()
        self.most_columns: int = self._library.octavo_sampling_most_columns()

    def sample(self, values: Sequence[int | float], num_rows: int, vocab_size: int) -> list[int]:
        """A token for each row, -1 where its largest logit is not finite.

        `values` are, row after row: address of the logits, seed, position (of 64 bits each),
        temperature (0: greedy), top_p (1: all), min_p (0: all), top_k (0: all), choice (32 bits).
        """
        tokens = (ctypes.c_int32 * num_rows)()
        rows = struct.pack(_SAMPLING_ROW * num_rows, *values)
        self._check(self._library.octavo_sample(self._kernel, rows, num_rows, vocab_size, tokens))
        return list(tokens)

    def logprobs(
        self, values: Sequence[int], num_rows: int, num_top: int, vocab_size: int
    ) -> TopLogprobs:
        """`values` are, row after row: address of the logits, token id, num_logprobs.

        `num_top` is the sum of num_logprobs; each of them lies in 0 .. vocab_size.
        """
        tokens = np.empty(num_rows, _TOKEN_LOGPROB)
        top_ids, top_logprobs = np.empty(num_top, np.int32), np.empty(num_top, np.float64)
        rows = struct.pack(_LOGPROBS_ROW * num_rows, *values)
        outputs = [array.ctypes.data for array in (tokens, top_ids, top_logprobs)]
        self._check(
            self._library.octavo_logprobs(self._kernel, rows, num_rows, vocab_size, *outputs)
        )
        return TopLogprobs(
            tokens["logprob"].tolist(), tokens["rank"].tolist(), top_ids, top_logprobs
        )

    def _check(self, status: int) -> None:
        if status != 0:
            raise MemoryError("no memory was left for a row of logits while sampling")


@functools.cache
def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.octavo_sampling_kernel.restype = pointer
    library.octavo_sampling_most_columns.restype = size
    library.octavo_sample.argtypes = [pointer, pointer, size, size, pointer]
    library.octavo_logprobs.argtypes = [pointer, pointer, size, size, pointer, pointer, pointer]
    return library
