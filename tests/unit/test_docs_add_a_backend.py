"""docs/add-a-backend.md: what it quotes is in the tree, and its example builds and runs engines."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from octavo import backends
from octavo.backends import registry
from octavo.backends.base import EngineKind
from octavo.backends.kernels import torch_operators
from octavo.compiler import BuildConfig, build_engine
from octavo.graphs.errors import BackendError, BuildError
from octavo.tools.comparison import compare
from octavo.tools.greedy import GreedyDecoder
from tests.backend.steps import Sequence, pack, run_step
from tests.backend.test_engines import WRONG_STEPS
from tests.backend.tiny_engines import NUM_BLOCKS, TinyEngine
from tests.parity import tiny_models

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "add-a-backend.md").read_text()
# "```python file PATH" is a new file, "from PATH" a quotation, "line PATH" a line to add there.
BLOCKS = re.findall(
    r"^```python (file|from|line) (\S+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL
)
QUOTATIONS = [(path, body) for kind, path, body in BLOCKS if kind == "from"]
LINES = [body for kind, _, body in BLOCKS if kind == "line"]
FILES = {path: body for kind, path, body in BLOCKS if kind == "file"}
NAME = "native_norm"
SEQUENCE = Sequence(np.random.default_rng(0).integers(3, tiny_models.VOCAB_SIZE, 50), [5, 2, 9, 4])


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The example is where the document puts it: a folder beside the other backends."""
    folder = tmp_path_factory.mktemp("example")
    for name, body in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(body)
    ((name, module),) = ast.literal_eval("{" + LINES[0] + "}").items()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "__path__", [*backends.__path__, str(folder)])
        patch.setitem(registry._MODULES, name, module)
        yield folder
    for loaded in [one for one in sys.modules if one.startswith(module)]:
        del sys.modules[loaded]
    if hasattr(backends, NAME):
        delattr(backends, NAME)


@pytest.fixture(scope="module")
def engines(example: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyEngine]:
    folder = tmp_path_factory.mktemp("engines")
    checkpoint, model = tiny_models.checkpoint(folder / "model", "llama")
    made = {}
    for backend in (NAME, "torch"):
        config = BuildConfig(
            model=str(checkpoint),
            output=folder / backend,
            backend=backend,
            max_model_len=128,
            use_cache=False,
        )
        made[backend] = TinyEngine(build_engine(config).path, model, checkpoint)
    return made


def test_every_block_is_checked() -> None:
    assert len(BLOCKS) == TEXT.count("```") // 2
    assert len(QUOTATIONS) >= 8
    assert len(LINES) == 1
    assert set(FILES) == {f"{NAME}/{file}.py" for file in ("__init__", "backend", "executable")}


@pytest.mark.parametrize(("path", "body"), QUOTATIONS)
def test_a_quotation_is_in_its_file(path: str, body: str) -> None:
    assert body in (ROOT / path).read_text()


def test_paths_that_are_named_exist() -> None:
    # In `backticks`: of the tree's folders, and files of docs/ that are linked.
    folders = r"`((?:backends|graphs|compiler|tests)/[\w/.]+)`"
    named = [
        *re.findall(folders, TEXT),
        *(f"docs/{one}" for one in re.findall(r"\]\((\w+\.md)", TEXT)),
    ]
    assert len(named) > 10
    assert [one for one in named if not (ROOT / one).exists()] == []


def test_the_example_computes_what_torch_does(engines: dict[str, TinyEngine]) -> None:
    """The logits of transformers and of the torch engine, in one step and in chunks."""
    expected = engines[NAME].expected(SEQUENCE)
    atol = 1e-5 * np.abs(expected).max()
    executable = engines[NAME].load()
    (whole,) = run_step(executable, [(SEQUENCE, 0, 50)])
    np.testing.assert_allclose(whole, expected, rtol=0, atol=atol)
    executable.allocate_kv_cache(NUM_BLOCKS)
    parts = [run_step(executable, [(SEQUENCE, *part)])[0] for part in ((0, 17), (17, 49), (49, 50))]
    np.testing.assert_allclose(np.concatenate(parts), expected, rtol=0, atol=atol)
    executable.close()
    executable.close()
    prompt = {"prompt": SEQUENCE.tokens.tolist()}
    with GreedyDecoder(engines["torch"].path) as a, GreedyDecoder(engines[NAME].path) as b:
        (row,) = compare(a, b, prompt, max_tokens=16)
    assert row.same_tokens
    assert row.max_logit_difference <= atol


def test_its_norms_are_native(
    engines: dict[str, TinyEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Llama of two layers has five norms; the torch engine has none of ours."""
    records = {name: engines[name].manifest.passes for name in engines}
    matches = {
        name: [one.matches for one in records[name] if one.name == "fuse_norms"] for name in records
    }
    assert matches == {NAME: [5], "torch": [0]}
    kernel, calls = torch_operators.operators()["norm"], []

    def counted(*operands: object) -> object:
        calls.append(operands)
        return kernel(*operands)

    monkeypatch.setitem(torch_operators.operators(), "norm", counted)
    executable = engines[NAME].load()
    run_step(executable, [(SEQUENCE, 0, 50)])
    assert len(calls) == 5
    executable.close()


def test_it_copies_blocks(engines: dict[str, TinyEngine]) -> None:
    executable = engines[NAME].load()
    (whole,) = run_step(executable, [(SEQUENCE, 0, 50)])
    executable.copy_blocks([(block, block + 6) for block in SEQUENCE.blocks])
    moved = Sequence(SEQUENCE.tokens, [block + 6 for block in SEQUENCE.blocks])
    (last,) = run_step(executable, [(moved, 49, 50)])
    np.testing.assert_allclose(last, whole[49:], rtol=0, atol=1e-5 * np.abs(whole).max())
    executable.close()


@pytest.mark.parametrize("wrong", WRONG_STEPS)
def test_it_refuses_wrong_steps(engines: dict[str, TinyEngine], wrong: str) -> None:
    executable = engines[NAME].load()
    with pytest.raises(BackendError):
        executable.run(WRONG_STEPS[wrong](pack([(SEQUENCE, 0, 50)])))
    executable.close()


def test_it_refuses_what_it_leaves_out(example: Path) -> None:
    backend = registry.get(NAME)
    backend.require(EngineKind(dtype="float32", kv_cache_dtype="float32"), 16)
    with pytest.raises(BuildError, match="not of bfloat16: leave out --dtype"):
        backend.require(EngineKind(dtype="bfloat16", kv_cache_dtype="bfloat16"), 16)
    with pytest.raises(BuildError, match="not of int8: leave out"):
        backend.require(EngineKind(dtype="float32", kv_cache_dtype="int8"), 16)
