"""Keeps a completion to its grammar: before each token, those that cannot follow are forbidden."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from octavo.graphs.errors import RequestError
from octavo.runtime.sampling.grammars import Grammar, allowed_tokens, check_matcher

if TYPE_CHECKING:
    from octavo.backends.base import Int32Array
    from octavo.runtime.sampling.logits_processors import LogitsRow


class GrammarMask:
    """The logits processor of one sequence.

    eos_token_ids   allowed where the text may end, nowhere else
    stop_token_ids  the request's own, allowed there and wherever the grammar has them
    ignore_eos      `eos_token_ids` are allowed only where the text can do nothing but end

    What a row gets depends on its history alone; the matcher kept from row to row only saves work,
    and is taken back when drafts were rejected or a failed step is tried again.
    """

    def __init__(
        self,
        grammar: Grammar,
        *,
        eos_token_ids: Sequence[int],
        stop_token_ids: Sequence[int],
        ignore_eos: bool,
    ) -> None:
        self._grammar = grammar
        self._eos_ids = np.array(eos_token_ids, np.intp)
        self._stop_ids = np.array(stop_token_ids, np.intp)
        self._ignore_eos = ignore_eos
        self._matcher = grammar.matcher()
        self._followed: Int32Array = np.empty(0, np.int32)  # what the matcher has consumed

    def __call__(self, row: LogitsRow) -> None:
        """RequestError if the row's history is none of the grammar's, or the grammar too complex.

        The first can happen after a draft only, which is about to be rejected.
        """
        try:
            self._follow(row.output_token_ids)
            self._mask(row)
        except RequestError:
            # The matcher does not recover from an error, the sequence may.
            self._restart()
            raise

    def _mask(self, row: LogitsRow) -> None:
        allowed = allowed_tokens(self._matcher, len(row.values))
        check_matcher(self._matcher, "has become too complex")
        allowed[self._eos_ids] = False
        if not len(row.output_token_ids):
            allowed[self._grammar.altered_ids] = False
        if self._matcher.is_accepting():
            if not (self._ignore_eos and allowed.any()):
                allowed[self._eos_ids] = True
            allowed[self._stop_ids] = True
        np.putmask(row.editable(), ~allowed, -np.inf)

    def _follow(self, history: Int32Array) -> None:
        length = min(len(self._followed), len(history))
        differs = self._followed[:length] != history[:length]
        common = int(differs.argmax()) if differs.any() else length
        num_wrong = len(self._followed) - common
        if num_wrong and not self._matcher.rollback(num_wrong):
            self._restart()
            common = 0
        rest = history[common:].tolist()
        if self._matcher.try_consume_tokens(rest) < len(rest):
            raise RequestError(
                "the tokens of the output do not follow the grammar of structured_outputs: "
                "no other is allowed by it, so send the request again"
            )
        self._followed = history.copy()

    def _restart(self) -> None:
        self._matcher = self._grammar.matcher()
        self._followed = np.empty(0, np.int32)
