"""torch_tensorrt as far as the backend asks for it, with PyTorch in place of TensorRT.

Signatures as in pytorch/TensorRT: `dynamo/_compiler.py`, `_compile.py` and `_Input.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.export import ExportedProgram


class Input:
    def __init__(self, **given: Any) -> None:
        self.given = given


class FakeTorchTensorRT:
    """`compiled` holds what compile was asked for, `saved` and `loaded` likewise."""

    Input = Input

    def __init__(self) -> None:
        self.compiled: list[SimpleNamespace] = []
        self.saved: list[dict[str, Any]] = []
        self.loaded: list[str] = []
        self.dynamo = SimpleNamespace(compile=self._compile)
        self._programs: dict[int, ExportedProgram] = {}

    def _compile(
        self,
        exported_program: ExportedProgram,
        inputs: Sequence[Any] | None = None,
        *,
        arg_inputs: Sequence[Any] | None = None,
        use_explicit_typing: bool = False,
        **settings: Any,
    ) -> Any:
        settings["use_explicit_typing"] = use_explicit_typing
        self.compiled.append(
            SimpleNamespace(
                program=exported_program, inputs=inputs, arg_inputs=arg_inputs, settings=settings
            )
        )
        module = exported_program.module()
        self._programs[id(module)] = exported_program
        return module

    def save(
        self, module: Any, file_path: str = "", *, output_format: str, retrace: bool = True
    ) -> None:
        self.saved.append({"output_format": output_format, "retrace": retrace})
        torch.export.save(self._programs[id(module)], file_path)

    def load(self, file_path: str = "") -> ExportedProgram:
        self.loaded.append(file_path)
        return torch.export.load(file_path)
