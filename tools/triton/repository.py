"""Writes models into a model repository; each appears whole or not at all."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.graphs.errors import BuildError
from octavo.tools.triton.config_file import config_pbtxt
from octavo.tools.triton.instructions import readme
from octavo.tools.triton.stub import settings as model_settings

if TYPE_CHECKING:
    from octavo.tools.triton.stub.settings import Settings

STUB = Path(__file__).with_name("stub")
README = "README.md"
VERSION = "1"
ENGINE = "engine"  # in the folder of the version, if it is copied
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def write_model(
    repository: Path, name: str, settings: Settings, *, instances: int, copy_engine: bool
) -> Path:
    """Adds the model `name`, or replaces it; the model's folder.

    settings     with the absolute path of the engine; copied, it is named relatively
    copy_engine  whether the engine is copied into the repository

    BuildError if the repository holds what `octavo export-triton` did not write, or cannot be
    written.
    """
    # Not needed to start any other command, and the compiler's package is not light.
    from octavo.compiler import publish

    if not _NAME.fullmatch(name):
        raise BuildError(
            f"{name!r} cannot name a model: use letters, digits, '.', '_' and '-', "
            "the first a letter or digit"
        )
    repository = repository.expanduser().absolute()
    with publish.staging_folder(repository, partial(_require_ours, name=name)) as staging:
        model = staging / name
        _write_files(model, name, settings, instances=instances, copy_engine=copy_engine)
        names = sorted({name, *_models(repository)})
        (staging / README).write_text(readme(repository, names, settings.python), encoding="utf-8")
        publish.sync_tree(staging)
        if not repository.is_dir() or not any(repository.iterdir()):
            publish.move_into_place(staging, repository)
        else:
            publish.move_into_place(model, repository / name)
            (staging / README).replace(repository / README)
    return repository / name


def _write_files(
    model: Path, name: str, settings: Settings, *, instances: int, copy_engine: bool
) -> None:
    version = model / VERSION
    version.mkdir(parents=True)
    (model / "config.pbtxt").write_text(config_pbtxt(name, instances), encoding="utf-8")
    for file in STUB.glob("*.py"):
        shutil.copyfile(file, version / file.name)
    if copy_engine:
        shutil.copytree(settings.engine, version / ENGINE)
        settings = replace(settings, engine=ENGINE)
    (version / model_settings.FILE_NAME).write_text(settings.to_json(), encoding="utf-8")


def _require_ours(repository: Path, name: str) -> None:
    if repository.is_symlink() or (repository.exists() and not repository.is_dir()):
        raise BuildError(f"{repository} is a file or a link, not a folder: choose another output")
    if not repository.is_dir() or not any(repository.iterdir()):
        return
    if not _models(repository):
        raise BuildError(
            f"{repository} has files but no model of `octavo export-triton`: choose another output"
        )
    if (repository / name).exists() and name not in _models(repository):
        raise BuildError(
            f"{repository / name} is there and no model of `octavo export-triton`: "
            "choose another --name"
        )


def _models(repository: Path) -> list[str]:
    """Those that `write_model` has written."""
    found = repository.glob(f"*/{VERSION}/{model_settings.FILE_NAME}")
    return sorted(path.parents[1].name for path in found if _is_ours(path.parent))


def _is_ours(version: Path) -> bool:
    try:
        model_settings.read_settings(version)
    except model_settings.SettingsError:
        return False
    return True
