"""The process that speculation is measured in: `python -m octavo.tools.bench.speculative`.

One engine answers the same prompts with and without drafts, by turns, and has to say the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from octavo.graphs.errors import OctavoError
from octavo.runtime import LLM, RequestOutput, SamplingParams
from octavo.runtime.prompts import Prompt

_NGRAM = 8  # tokens; a text that repeats many of them goes round in circles

Values = dict[str, Any]  # the scenario's fields
Series = dict[str, list[float]]


class Comparison:
    """Prompts of a scenario on an engine that speculates."""

    def __init__(self, llm: LLM, scenario: Values) -> None:
        if llm.engine.speculator is None:
            raise OctavoError(
                "the engine has no drafter: give --method ngram, or build it with --speculative"
            )
        self._llm = llm
        self._scenario = scenario
        self._prompts = [self._prompt(text) for text in scenario["prompts"]]

    def run(self) -> Series:
        """Tokens a second while decoding, with and without drafts, and what became of those."""
        self._generate(speculate=False)  # warm-up: prompts are cached from here on
        self._generate(speculate=True)
        before = self._counts()
        series: Series = {"speed-up": [], "with": [], "without": []}
        for _ in range(self._scenario["runs"]):
            without, with_drafts = (self._generate(speculate=flag) for flag in (False, True))
            if _tokens(without) != _tokens(with_drafts):
                raise OctavoError(
                    f"{self._scenario['name']}: tokens with drafts differ from those without: "
                    "report this, speculation must not change them"
                )
            speeds = [_speed(outputs) for outputs in (with_drafts, without)]
            series["with"].append(speeds[0])
            series["without"].append(speeds[1])
            series["speed-up"].append(speeds[0] / speeds[1])
        return series | self._acceptance(before) | {"distinct": [_distinct(without)]}

    def _prompt(self, text: str) -> Prompt:
        if not self._scenario["chat"]:
            return text
        return self._llm.chat_prompt([{"role": "user", "content": text}])

    def _generate(self, *, speculate: bool) -> list[RequestOutput]:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=self._scenario["output_tokens"],
            stop=self._scenario["stop"],
            speculate=speculate,
        )
        width = self._scenario["num_seqs"]
        outputs: list[RequestOutput] = []
        for start in range(0, len(self._prompts), width):
            outputs += self._llm.generate(self._prompts[start : start + width], params)
        return outputs

    def _counts(self) -> list[int]:
        metrics = self._llm.metrics()
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        totals = [metrics[f"spec_decode_{name}"] for name in names]
        per_position = metrics["spec_decode_num_accepted_tokens_per_pos"]
        return [*totals, *per_position.values()]

    def _acceptance(self, before: list[int]) -> Series:
        num_drafts, drafted, accepted, *per_position = (
            now - then for now, then in zip(self._counts(), before, strict=True)
        )
        series = {
            "tokens per verification": [1 + accepted / max(num_drafts, 1)],
            "acceptance rate": [100 * accepted / max(drafted, 1)],
        }
        for position, count in enumerate(per_position, 1):
            if count:
                series[f"accepted at {position}"] = [100 * count / num_drafts]
        return series


def _tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def _speed(outputs: Sequence[RequestOutput]) -> float:
    """Tokens a second after each first one; sequences of one batch share their time."""
    seconds = [output.metrics.decode_time or 0.0 for output in outputs]
    count = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
    return count / max(sum(seconds), 1e-9)


def _distinct(outputs: Sequence[RequestOutput]) -> float:
    """Percent of the outputs' n-grams that are not said twice by the same one."""
    grams = [
        [tuple(ids[i : i + _NGRAM]) for i in range(len(ids) - _NGRAM + 1)]
        for ids in _tokens(outputs)
    ]
    total = sum(map(len, grams))
    return 100 * sum(len(set(own)) for own in grams) / max(total, 1)


def main() -> None:
    engine, text = sys.argv[1:]
    scenario = json.loads(text)
    with LLM(engine, speculative=scenario.get("speculative")) as llm:
        print(json.dumps(Comparison(llm, scenario).run()))


if __name__ == "__main__":
    main()
