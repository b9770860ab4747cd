"""Opening engines: what is refused, and that serving starts light."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import octavo.runtime
from octavo.backends import null
from octavo.graphs.errors import (
    BackendError,
    BundleError,
    CapacityError,
    IncompatibleEngineError,
    OctavoError,
    RequestError,
)
from octavo.runtime import LLM
from tests.unit.runtime_bundles import byte_tokenizer, write_text_engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_engine(tmp_path_factory.mktemp("loading") / "engine")


def test_a_closed_llm_says_so(engine: Path) -> None:
    llm = LLM(engine)
    llm.close()
    llm.close()
    with pytest.raises(OctavoError, match="the LLM is closed"):
        llm.generate("a")


def test_a_tampered_file_is_refused(tmp_path: Path) -> None:
    engine = write_text_engine(tmp_path / "engine")
    (engine / "tokenizer.json").write_bytes(byte_tokenizer().replace(b"<s>", b"<t>"))
    with pytest.raises(BundleError, match=r"tokenizer.json was changed after the build"):
        LLM(engine)


def test_a_changed_file_explains_the_failure_it_causes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise BackendError("protobuf parsing failed")

    engine = write_text_engine(tmp_path / "engine")
    monkeypatch.setattr(null.NullBackend, "load", fail)
    with pytest.raises(BackendError, match="protobuf parsing failed"):
        LLM(engine)
    (engine / "model.null").write_text("cut")
    with pytest.raises(BundleError, match=r"model.null has 3 bytes, the manifest says"):
        LLM(engine)


def test_an_engine_for_another_machine_is_refused(tmp_path: Path) -> None:
    engine = write_text_engine(tmp_path / "engine")
    manifest = json.loads((engine / "manifest.json").read_text())
    manifest["target"]["architecture"] = "vax"
    (engine / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(IncompatibleEngineError, match=r"cannot run here: .* built for vax"):
        LLM(engine)


def test_a_cache_that_does_not_fit_into_memory_is_refused(engine: Path) -> None:
    with pytest.raises(CapacityError, match=r"of 1000000000000000 blocks, .* bytes, does not fit"):
        LLM(engine, num_kv_blocks=10**15)


def test_num_threads_is_checked(engine: Path) -> None:
    with pytest.raises(RequestError, match="num_threads is 0, it must be an integer of at least 1"):
        LLM(engine, num_threads=0)


def test_import_is_light(null_engine: Path) -> None:
    code = f"""
import sys
import octavo.runtime
heavy = {{"pydantic", "tokenizers", "jinja2", "onnxruntime", "torch", "octavo.compiler"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
llm = octavo.runtime.LLM({str(null_engine)!r})
assert not {{"jinja2", "tokenizers", "octavo.compiler"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_public_names() -> None:
    for name in octavo.runtime.__all__:
        assert hasattr(octavo.runtime, name)
