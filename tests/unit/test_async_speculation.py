"""AsyncLLM with drafts, in a child process and in a thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from octavo.graphs.errors import RequestError
from octavo.runtime import LLM, SamplingParams
from octavo.runtime.async_llm import AsyncLLM
from tests.unit.async_harness import ids, last, run
from tests.unit.runtime_bundles import write_text_engine

WHERE = pytest.mark.parametrize("where", ["process", "thread"])
# Of two letters, so that what came before comes again.
PARAMS = SamplingParams(allowed_token_ids=[65, 66], max_tokens=20, temperature=0.0, logprobs=1)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_engine(tmp_path_factory.mktemp("engine") / "text")


@WHERE
def test_options_of_drafts_reach_the_engine(
    bundle: Path, where: Literal["process", "thread"]
) -> None:
    with LLM(bundle) as llm:
        (wanted,) = llm.generate(ids(65, 66, 65), PARAMS)

    async def test() -> tuple[Any, Any]:
        options: Any = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
        async with AsyncLLM(bundle, engine=where, speculative=options) as llm:
            output = await last(llm, ids(65, 66, 65), PARAMS)
            return output.outputs, await llm.metrics()

    outputs, metrics = run(test())
    assert outputs == wanted.outputs
    assert metrics["spec_decode_num_draft_tokens"] > 0
    per_position = metrics["spec_decode_num_accepted_tokens_per_pos"]
    assert [place for place, count in per_position.items() if count] <= ["0", "1", "2"]


@WHERE
def test_a_request_goes_without_drafts_where_it_says_so(
    bundle: Path, where: Literal["process", "thread"]
) -> None:
    async def test() -> Any:
        async with AsyncLLM(bundle, engine=where, speculative="ngram") as llm:
            params = SamplingParams(allowed_token_ids=[65, 66], max_tokens=20, speculate=False)
            await last(llm, ids(65, 66, 65), params)
            return await llm.metrics()

    assert run(test())["spec_decode_num_drafts"] == 0


@WHERE
def test_a_drafter_that_the_engine_has_not_is_refused(
    bundle: Path, where: Literal["process", "thread"]
) -> None:
    async def test() -> None:
        async with AsyncLLM(bundle, engine=where, speculative="medusa"):
            raise AssertionError("it started")

    with pytest.raises(RequestError, match="the engine has no drafter 'medusa', it has ngram"):
        run(test())
