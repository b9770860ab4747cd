"""Whatever a client sends, the server does not fail, and answers as its own document says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from octavo.tools.server.requests import ChatRequest, CompletionRequest
from tests.server_process import ServerProcess, serving
from tests.unit.word_bundles import write_word_engine

TEMPLATE = "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.content }} {% endfor %}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    engine = tmp_path_factory.mktemp("engines") / "words"
    with serving(write_word_engine(engine, chat_template=TEMPLATE)) as process:
        yield process


OPERATIONS = [
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{name}", "GET"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/info", "GET"),
    ("/health", "GET"),
    ("/ready", "GET"),
    ("/metrics", "GET"),
]
# Nearly every request that is made up is refused for one of its fields: others have few of them.
FIELDS = st.sampled_from(sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields}))
SOUND: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "words", "prompt": "w1 w2"},
    "/v1/chat/completions": {"model": "words", "messages": [{"role": "user", "content": "w1"}]},
    "/tokenize": {"model": "words"},
    "/detokenize": {"model": "words"},
}
CHECKS = [
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
    content_type_conformance,
]


@pytest.fixture(scope="module")
def document(server: ServerProcess) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_the_document_has_no_other_operations(document: Any) -> None:
    found = [result.ok() for result in document.get_all_operations()]
    assert {(one.path, one.method.upper()) for one in found} == set(OPERATIONS)


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_no_request_makes_the_server_fail(document: Any, path: str, method: str) -> None:
    operation = document[path][method]

    @settings(
        max_examples=100,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(), kept=st.none() | st.sets(FIELDS, max_size=3))
    def answers(case: Any, kept: set[str] | None) -> None:
        if isinstance(case.body, dict):
            case.body.pop("stream", None)  # the document tells of whole answers
            if kept is not None:
                case.body = {name: case.body[name] for name in kept if name in case.body}
                case.body |= SOUND.get(path, {})
        case.validate_response(case.call(timeout=60), checks=CHECKS)

    answers()
