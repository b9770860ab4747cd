"""The model as Triton's Python backend calls it, with a backend that is none."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from octavo.tools.triton.repository import write_model
from octavo.tools.triton.stub.settings import Settings
from tests.unit.triton_fakes import Request, TritonError, backend_utils, wait_until
from tests.unit.word_bundles import LIMITS, continuation, words, write_word_engine

PROMPT = [3, 14, 15]
ARGS = {"model_name": "m", "model_version": "1", "model_instance_name": "m_0_0"}


def load(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports the model as the stub does, and gives it to the caller with its backend."""
    utils = backend_utils()
    monkeypatch.setattr("os.getppid", lambda: None)  # these tests do not end with who runs them
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utils)
    monkeypatch.syspath_prepend(str(repository / "m"))
    for name in [name for name in sys.modules if name == "1" or name.startswith("1.")]:
        monkeypatch.delitem(sys.modules, name)
    model = importlib.import_module("1.model").TritonPythonModel()
    return model, utils


def write(folder: Path, **options: Any) -> Path:
    engine = write_word_engine(folder / "engine", limits=LIMITS)
    settings = Settings(
        str(engine), sys.executable, engine_options={"kv_cache_memory": "1MiB"}, **options
    )
    return write_model(folder / "repository", "m", settings, instances=1, copy_engine=True).parent


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made, _ = load(write(tmp_path), monkeypatch)
    made.initialize(ARGS)
    yield made
    made.finalize()


def prompt(**inputs: Any) -> Request:
    return Request(text_input=words(PROMPT), temperature=np.array([0.0], np.float32), **inputs)


def test_requests_of_one_call_are_answered_and_a_bad_one_harms_no_other(model: Any) -> None:
    good = prompt(max_tokens=np.array([4], np.int32))
    bad, none = prompt(max_tokens=np.array([0], np.int32)), Request()
    assert model.execute([good, bad, none]) is None
    assert good.sender.text() == words(PROMPT) + words(continuation(PROMPT, 4))
    for request, sentence in ((bad, "max_tokens is 0"), (none, "a request needs text_input")):
        with pytest.raises(TritonError, match=sentence) as caught:
            request.sender.wait()
        assert caught.value.code == TritonError.INVALID_ARG


def test_outputs_have_the_declared_types(model: Any) -> None:
    names = ("num_input_tokens", "num_output_tokens", "cumulative_logprob", "finish_reason")
    request = prompt(**{f"return_{name}": np.array([True]) for name in names})
    model.execute([request])
    (response,) = request.sender.wait()
    assert response.outputs["num_input_tokens"].array.tolist() == [3]
    assert response.outputs["num_output_tokens"].array.dtype == np.uint32
    assert response.outputs["cumulative_logprob"].array.dtype == np.float32
    assert response.outputs["finish_reason"].array.tolist() == [b"length"]


def test_a_client_that_leaves_is_noticed(model: Any) -> None:
    request = prompt(max_tokens=np.array([200], np.int32), stream=np.array([True]))
    request.sender.delay = 0.02
    model.execute([request])
    wait_until(lambda: bool(request.sender.responses))
    request.sender.cancelled = True
    with pytest.raises(TritonError, match="the client cancelled the request") as caught:
        request.sender.wait()
    assert caught.value.code == TritonError.CANCELLED


def test_the_model_is_ready_only_while_its_engine_runs(model: Any) -> None:
    assert model.is_ready() is True
    (engine,) = psutil.Process().children()
    engine.kill()
    wait_until(lambda: model.is_ready() is False)
    refused = prompt()
    model.execute([refused])
    with pytest.raises(TritonError, match="killed by signal 9") as caught:
        refused.sender.wait()
    assert caught.value.code == TritonError.UNAVAILABLE
    wait_until(lambda: model.is_ready() is True)


def test_the_health_of_the_engine_is_a_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, utils = load(write(tmp_path), monkeypatch)
    model.initialize(ARGS)

    def engine_up() -> float | None:
        family = utils.MetricFamily.made.get("octavo:engine_up")
        return family.metrics[0].value if family is not None and family.metrics else None

    wait_until(lambda: engine_up() == 1)
    (engine,) = psutil.Process().children()
    engine.kill()
    wait_until(lambda: engine_up() == 0)
    wait_until(lambda: engine_up() == 1)
    model.finalize()
    assert psutil.Process().children() == []


def test_a_model_whose_engine_is_given_up_asks_to_be_unloaded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, utils = load(write(tmp_path, max_restarts=0), monkeypatch)
    model.initialize(ARGS)
    (engine,) = psutil.Process().children()
    engine.kill()
    wait_until(lambda: utils.unloaded != [])
    assert model.is_ready() is False
    model.finalize()
    assert utils.unloaded == ["m"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", r"model\.json cannot be read"),
        ("[]", "holds no JSON object"),
        ('{"engine": "engine"}', "names no python"),
        ('{"engine": "engine", "python": "p", "speed": 1}', "has the unknown entry 'speed'"),
        (
            '{"engine": "e", "python": "p", "max_restarts": -1}',
            "max_restarts is -1, it must be an integer of at least 0",
        ),
        ('{"engine": "e", "python": "p"}', "could not be started"),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, sentence: str
) -> None:
    repository = write(tmp_path)
    (repository / "m" / "1" / "model.json").write_text(text)
    model, utils = load(repository, monkeypatch)
    with pytest.raises(utils.TritonModelException, match=sentence):
        model.initialize(ARGS)
