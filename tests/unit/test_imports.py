"""Which part may import which: tools -> {compiler, runtime} -> backends -> graphs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {
    "graphs": {"graphs"},
    "backends": {"backends", "graphs"},
    "compiler": {"compiler", "backends", "graphs"},
    "runtime": {"runtime", "backends", "graphs"},
    "tools": {"tools", "compiler", "runtime", "backends", "graphs"},
}
# A checkpoint given to LLM is built on first use: the one way from the runtime to the compiler.
LAZY_EXCEPTIONS = {("runtime/loading.py", "compiler")}
# Its files are copied to where there is no Octavo: they import one another relatively, and no part.
COPIED = "tools/triton/stub/"


@dataclass(frozen=True)
class Import:
    file: str  # relative to the root, with forward slashes
    line: int
    part: str  # the part that is imported
    in_function: bool

    @property
    def allowed(self) -> bool:
        if self.part in ALLOWED[self.file.partition("/")[0]]:
            return True
        return self.in_function and (self.file, self.part) in LAZY_EXCEPTIONS


def python_files() -> list[Path]:
    files = [file for part in ALLOWED for file in (ROOT / part).rglob("*.py")]
    return sorted(file for file in files if file.relative_to(ROOT).parts[-2] != "__pycache__")


def imports(tree: ast.AST, file: str, in_function: bool = False) -> Iterator[Import]:
    """Every import of one of the parts, whatever the way it is written."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            names = [f"{prefix}.{alias.name}" for alias in node.names]
        else:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports(node, file, in_function or is_function)
            continue
        if isinstance(node, ast.ImportFrom) and node.level == 1 and file.startswith(COPIED):
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "octavo":
                yield Import(file, node.lineno, rest.partition(".")[0], in_function)
            elif package == "" or package in ALLOWED:
                pytest.fail(f"{file}:{node.lineno} must import octavo's parts as octavo.*: {name}")


def imports_of(file: Path) -> list[Import]:
    tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    return list(imports(tree, file.relative_to(ROOT).as_posix()))


def run(code: str) -> str:
    """Output of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_import_goes_one_way() -> None:
    forbidden = [
        f"{found.file}:{found.line} imports octavo.{found.part}"
        for file in python_files()
        for found in imports_of(file)
        if not found.allowed
    ]
    assert forbidden == []


@pytest.mark.parametrize(
    ("file", "source", "allowed"),
    [
        ("tools/x.py", "from octavo.runtime import LLM", True),
        ("runtime/x.py", "import octavo.backends.base", True),
        ("runtime/x.py", "from octavo import compiler", False),
        ("graphs/x.py", "def f():\n    from octavo.backends import base", False),
        ("compiler/x.py", "from octavo.runtime.llm import LLM", False),
        ("runtime/loading.py", "from octavo.compiler import build_engine", False),
        ("runtime/loading.py", "def f():\n    from octavo.compiler import build_engine", True),
        ("runtime/engine.py", "def f():\n    from octavo.compiler import build_engine", False),
    ],
)
def test_the_rule_itself(file: str, source: str, allowed: bool) -> None:
    (found,) = imports(ast.parse(source), file)
    assert found.allowed is allowed


def test_what_is_copied_into_model_repositories_needs_no_octavo() -> None:
    files = [file for file in python_files() if COPIED in file.as_posix()]
    assert (ROOT / COPIED / "model.py") in files
    assert [found for file in files for found in imports_of(file)] == []
    allowed = {*sys.stdlib_module_names, "numpy", "triton_python_backend_utils"}
    for file in files:
        # The oldest Python of a server's image that the docs name.
        tree = ast.parse(file.read_text(encoding="utf-8"), feature_version=(3, 10))
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        modules = {
            name.partition(".")[0]
            for node in names
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""] * (node.level == 0)
            )
        }
        assert modules <= allowed, file


def test_octavo_is_a_namespace_and_its_parts_are_packages() -> None:
    assert not (ROOT / "octavo").exists()
    folders = {file.parent for file in python_files()}
    assert [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").is_file()] == []
    assert all((ROOT / part / "py.typed").is_file() for part in ALLOWED)


def test_importing_the_runtime_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'onnxruntime', 'onnx', 'pydantic', 'rich', 'typer', "
    heavy += "'llguidance'}"
    code = f"import sys, octavo.runtime; print(sorted({heavy} & set(sys.modules)))"
    assert run(code) == "[]\n"


def test_the_server_needs_neither_torch_nor_transformers() -> None:
    heavy = "{'torch', 'transformers', 'onnx'}"
    code = (
        "import sys, octavo.tools.main, octavo.tools.server.serving\n"
        f"print(sorted({heavy} & set(sys.modules)))"
    )
    assert run(code) == "[]\n"


def test_serving_a_null_engine_loads_neither_torch_nor_transformers(null_engine: Path) -> None:
    code = f"""
import sys
from octavo.runtime import LLM, SamplingParams
llm = LLM({str(null_engine)!r})
(output,) = llm.generate([{{"prompt_token_ids": [1, 2, 3]}}], SamplingParams(max_tokens=4))
assert len(output.outputs[0].token_ids) == 4
print(sorted({{"torch", "transformers", "onnxruntime"}} & set(sys.modules)))
"""
    assert run(code) == "[]\n"
