"""`octavo bench`: one engine beside that of another backend."""

from __future__ import annotations

import pytest

from octavo.tools.bench import scenario as scenarios
from octavo.tools.bench.measure import measure
from tests.backend.tiny_engines import TinyEngines


def test_another_backend_is_built_and_served_by_turns(tiny_engines: TinyEngines) -> None:
    engine = tiny_engines.get("onnxruntime", "llama")
    wanted = scenarios.parser.validate_python(
        {
            "kind": "another_backend",
            "name": "torch-1",
            "description": "",
            "backend": "torch",
            "num_seqs": 1,
            "prompt_tokens": 20,
            "output_tokens": 4,
            "runs": 2,
            "at_most": 1e-6,
        }
    )
    results = {one.metric: one for one in measure(wanted, engine.path, str(engine.checkpoint))}
    assert list(results) == ["ratio", "other", "this", "build"]
    assert {name: len(one.values) for name, one in results.items()} == {
        "ratio": 2, "other": 2, "this": 2, "build": 1,
    }  # fmt: skip
    for ratio, other, this in zip(
        results["ratio"].values, results["other"].values, results["this"].values, strict=True
    ):
        assert ratio == pytest.approx(other / this)
    assert results["ratio"].meets_target is False
    assert results["build"].meets_target is None
