"""Whatever the schema and the schedule, an output that ends by itself has its shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.runtime.llm_engine import LLMEngine
from octavo.runtime.sampling.sampling_params import RequestOutputKind, SamplingParams
from tests.unit.llm_engines import ids, run
from tests.unit.runtime_bundles import LIMITS, write_text_engine

NAMES = st.sampled_from(["a", "b c", 'd"', "\u00e9"])
LEAVES = st.one_of(
    st.fixed_dictionaries({"type": st.just("string"), "maxLength": st.integers(0, 3)}),
    st.fixed_dictionaries(
        {"type": st.just("integer"), "minimum": st.just(0), "maximum": st.just(99)}
    ),
    st.fixed_dictionaries({"type": st.sampled_from(["boolean", "null"])}),
    st.fixed_dictionaries({"enum": st.lists(NAMES | st.integers(0, 9), min_size=1, max_size=3)}),
)


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(NAMES, values, min_size=1, max_size=2)
    return properties.map(
        lambda found: {
            "type": "object",
            "properties": found,
            "required": list(found),
            "additionalProperties": False,
        }
    )


def arrays(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {"type": st.just("array"), "items": values, "maxItems": st.just(2)}
    )


SCHEMAS = st.recursive(LEAVES, lambda inner: objects(inner) | arrays(inner), max_leaves=3)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    limits = LIMITS.model_copy(update={"max_model_len": 160})
    path = tmp_path_factory.mktemp("engines") / "text"
    return write_text_engine(path, eos_token_ids=[0], limits=limits)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schemas=st.lists(SCHEMAS, min_size=1, max_size=3), seed=st.integers(0, 99))
def test_an_output_is_valid_and_independent_of_the_schedule(
    bundle: Path, schemas: list[dict[str, Any]], seed: int
) -> None:
    params = [
        SamplingParams(
            structured_outputs={"json": schema},
            temperature=1.5,
            seed=seed,
            max_tokens=100,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for schema in schemas
    ]
    alone = [_outputs(bundle, [one])[0] for one in params]
    together = _outputs(bundle, params)
    drafted = _outputs(bundle, params, speculative="ngram")
    assert alone == together == drafted
    for schema, (text, _, finish_reason) in zip(schemas, alone, strict=True):
        if finish_reason == "stop":
            jsonschema_rs.validate(schema, json.loads(text))


def _outputs(
    bundle: Path, params: list[SamplingParams], **options: Any
) -> list[tuple[str, list[int], str | None]]:
    engine = LLMEngine(bundle, **options)
    for number, one in enumerate(params):
        engine.add_request(str(number), ids([1, 2, 3]), one)
    outputs = sorted(run(engine), key=lambda output: int(output.request_id))
    assert [output.error for output in outputs] == [None] * len(params)
    completions = [output.outputs[0] for output in outputs]
    return [(one.text, one.token_ids, one.finish_reason) for one in completions]
