"""The console scripts as processes: exit codes, plain messages, a light start."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("script", ["octavo", "build-engine"])
def test_the_console_scripts_are_installed(script: str) -> None:
    path = Path(sys.executable).with_name(script)
    done = subprocess.run([path, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert f"Usage: {script} " in done.stdout


def test_a_refusal_is_one_sentence_and_exit_code_1(tmp_path: Path) -> None:
    done = run("octavo.tools.main", "inspect", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: {tmp_path} is no engine, it has no manifest.json: build one with `build-engine`\n"
    )


@pytest.mark.parametrize("arguments", [["inspect"], ["fly"], ["inspect", "x", "--fast"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    done = run("octavo.tools.main", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_many_options_are_listed_under_headings(command: str) -> None:
    help_text = run("octavo.tools.main", command, "--help").stdout
    sections = dict(re.findall(r"^(\w+):\n((?:  .*\n)+)", help_text, re.MULTILINE))
    assert list(sections)[:3] == ["Arguments", "Prompts", "Sampling"]
    assert list(sections)[-2:] == ["Engine", "Other"]
    assert "--min-p" in sections["Sampling"]
    assert "--stop" in sections["Stopping"]
    assert "--kv-cache-memory" in sections["Engine"]
    assert sections["Other"].split()[0] == "--help"


def test_starting_loads_nothing_heavy() -> None:
    code = (
        "import sys, octavo.tools.main, octavo.tools.build_engine\n"
        "heavy = {'torch', 'transformers', 'onnx', 'onnxruntime', 'octavo.compiler'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
