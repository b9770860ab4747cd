"""Backends by name: a broken one is an error of its own and of nobody else."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.backends import libraries, registry
from octavo.backends.base import EngineKind
from octavo.graphs.errors import BackendError, BuildError
from octavo.tools import backends
from octavo.tools.main import app

BROKEN = {
    "no such library": ("import a_library_of_tomorrow", "No module named 'a_library_of_tomorrow'"),
    "a missing .so": ("raise OSError('libcudart.so.13: cannot open')", "OSError: libcudart.so.13"),
    "a wrong version": ("raise RuntimeError('needs 9.0\\nhere is 8')", "RuntimeError: needs 9.0"),
    "an exit": ("raise SystemExit(3)", "SystemExit: 3"),
    "no backend": ("BACKEND_OF_TOMORROW = 1", "has no attribute 'BACKEND'"),
}


def add(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str) -> None:
    """A backend called "broken", whose module is `source`."""
    (folder / "a_broken_backend.py").write_text(source + "\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setitem(registry._MODULES, "broken", "a_broken_backend")
    monkeypatch.delitem(sys.modules, "a_broken_backend", raising=False)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_backend_is_one_sentence_and_the_others_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str
) -> None:
    source, reason = BROKEN[case]
    add(monkeypatch, tmp_path, source)
    with pytest.raises(BackendError) as caught:
        registry.get("broken")
    assert "the backend 'broken' cannot be used, its import failed with" in str(caught.value)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    result = CliRunner().invoke(app, ["backends"])
    assert result.exit_code == 0, result.output
    assert f"broken: {caught.value}" in result.stdout
    assert registry.get("null").name == "null"
    names = {one["backend"] for one in entries()}
    assert names == {*registry.names()} >= {"broken", "inductor", "onnxruntime", "torch"}


def test_a_backend_that_fails_to_describe_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    add(monkeypatch, tmp_path, "class Half:\n    devices = ('cpu',)\nBACKEND = Half()")
    (broken,) = [one for one in entries() if one["backend"] == "broken"]
    assert "it failed to describe itself (AttributeError: " in broken["reason"]
    add(
        monkeypatch,
        tmp_path,
        "class Half:\n    @property\n    def devices(self):\n        raise OSError('no\\ndevice')\n"
        "BACKEND = Half()",
    )
    (broken,) = [one for one in entries() if one["backend"] == "broken"]
    assert broken["reason"] == "it failed to describe itself (OSError: no)"


def test_an_unknown_backend_is_refused_with_all_names() -> None:
    with pytest.raises(BackendError, match="there is no backend 'tpu': choose one of inductor, nu"):
        registry.get("tpu")


def entries(*options: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["backends", "--json", *options])
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["backends"]
    return found


def test_what_is_told_is_what_is_required() -> None:
    """Every kind of engine that a backend lists is accepted, every other is refused."""
    told = {(one["backend"], one["device"]): one["kinds"] for one in entries()}
    assert told["onnxruntime", "cpu"] == told["inductor", "cpu"] == [
        {"dtype": "float32", "kv_cache_dtype": cache, "quantization": weights}
        for cache in ("float32", "int8")
        for weights in ("none", "int8", "int4")
    ]  # fmt: skip
    for dtype in ("float16", "bfloat16"):
        asked = EngineKind(dtype=dtype, kv_cache_dtype=dtype)
        assert dtype not in {kind["dtype"] for kind in told["onnxruntime", "cpu"]}
        with pytest.raises(BuildError, match=f"not in {dtype}"):
            registry.get("onnxruntime").require(asked, 16)
        registry.get("torch").require(asked, 16)
        assert dtype in {kind["dtype"] for kind in told["torch", "cpu"]}


def test_block_sizes_that_are_told_are_those_required() -> None:
    told = {(one["backend"], one["device"]): one["block_sizes"] for one in entries()}
    assert told["onnxruntime", "cpu"] == told["inductor", "cpu"] == [16 * n for n in range(1, 17)]
    assert told["onnxruntime", "cuda"] == [16, 32, 64, 128, 256]
    assert told["torch", "cpu"] == list(range(1, 257))
    kind = EngineKind(dtype="float32", kv_cache_dtype="float32")
    with pytest.raises(BuildError, match="block_size 24 is not a multiple of 16"):
        registry.get("onnxruntime").require(kind, 24)
    table = CliRunner().invoke(app, ["backends"]).stdout
    assert re.search(r"^  onnxruntime +cpu .* multiples of ", table, re.MULTILINE)
    assert re.search(r"^  torch_tensorrt +cuda .* any ", table, re.MULTILINE)


def test_what_is_here() -> None:
    here = {(one["backend"], one["device"]): one for one in entries()}
    for backend in ("inductor", "onnxruntime", "torch"):
        one = here[backend, "cpu"]
        assert (one["cannot_build"], one["cannot_run"], one["tested"]) == (None, None, "run")
        assert one["libraries"]
    assert here["tensorrt_rtx", "cuda"]["tested"] == "built"
    assert "linear_residual" in here["inductor", "cpu"]["operators"]
    assert here["torch", "cpu"]["operators"] == []


def test_a_probe_imports_and_survives_a_crash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of libraries that say they are here, in processes of their own."""
    monkeypatch.setattr(registry, "names", lambda: ("null",))
    assert [one["cannot_run"] for one in entries("--probe")] == [None]
    monkeypatch.setattr(registry, "names", lambda: ("torch",))
    (tmp_path / "torch.py").write_text("import os\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (crashed,) = entries("--probe")
    assert crashed["cannot_run"] == "importing its library ended the process with signal 6"
    (tmp_path / "torch.py").write_text("raise ImportError('libc10.so is of another version')\n")
    (failed,) = entries("--probe")
    assert "libc10.so is of another version" in str(failed["cannot_run"])
    (tmp_path / "torch.py").write_text("print('all is well')\nraise SystemExit(0)\n")
    (ended,) = entries("--probe")
    assert ended["cannot_run"] == "importing its library ended the process"
    (tmp_path / "torch.py").write_text(
        "import os\nos.write(2, b'\\xff\\n')\nos._exit(4)\n", encoding="utf-8"
    )
    (undecodable,) = entries("--probe")
    assert undecodable["cannot_run"] == "importing its library failed: \ufffd"


def test_a_probe_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(backends, "_PROBE_SECONDS", 1)
    monkeypatch.setattr(registry, "names", lambda: ("torch",))
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (late,) = entries("--probe")
    assert late["cannot_run"] == "importing its library did not end within 1 s"


def test_versions_of_what_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str | None:
        if name == "half-removed":
            raise KeyError(name)
        return None if name == "nameless" else "1.2"

    monkeypatch.setattr("importlib.metadata.version", version)
    assert libraries.version_of("half-removed") is None
    assert libraries.version_of("half-removed", "nameless", "whole") == "1.2"
    assert libraries.release("2.13.0+cpu") == ("2", "13")
