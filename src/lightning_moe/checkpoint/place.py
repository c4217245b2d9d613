"""Putting a checkpoint in its place: what was there goes only once the new one is complete, whenever the process is killed."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_moe.checkpoint.sources import REST

_log = logging.getLogger(__name__)


def partial_path(path: Path) -> Path:
    """Where a checkpoint is written until it is complete."""
    return _beside(path, "partial")


def prepare(path: Path) -> None:
    """Have nothing at :func:`partial_path`, in a folder that exists. To be called on one rank.

    Raises:
        IsADirectoryError: There is a folder at the path that is no checkpoint.

    """
    put_back(path)
    _refuse_foreign_folder(path)
    partial = partial_path(path)
    _remove(partial)
    partial.parent.mkdir(parents=True, exist_ok=True)


def discard(path: Path) -> None:
    """Remove what was not completed, as far as that is possible. To be called on one rank."""
    partial = partial_path(path)
    if _is_folder(partial):
        shutil.rmtree(partial, ignore_errors=True)
    else:
        partial.unlink(missing_ok=True)


def replace(new: Path, path: Path) -> None:
    """Put a complete checkpoint in the place of what is at the path. To be called on one rank."""
    with _aside(path, needed=_is_folder(path) or _is_folder(new)):
        new.replace(path)


@contextmanager
def make_way(path: Path) -> Iterator[None]:
    """Move a checkpoint that is a folder aside, for a file that somebody else writes in this context.

    Raises:
        IsADirectoryError: The folder is no checkpoint.

    """
    put_back(path)
    _refuse_foreign_folder(path)
    with _aside(path, needed=path.is_dir()):
        yield


def put_back(path: Path) -> None:
    """Bring back what was moved aside for a checkpoint that never came: its process was killed. To be called on one rank."""
    if os.path.lexists(path) or not os.path.lexists(old := _beside(path, "replaced")):
        return
    old.rename(path)
    _log.warning("The checkpoint at %s was about to be replaced, and another never came: it is back.", path)


@contextmanager
def tolerate_removal(path: str | Path) -> Iterator[None]:
    """Warn if an old checkpoint cannot be removed in this context: it is in nobody's way, and the new one is saved."""
    try:
        yield
    except Exception as error:
        _log.warning("The old checkpoint %s could not be removed: %s: %s", path, type(error).__name__, error)


@contextmanager
def _aside(path: Path, needed: bool) -> Iterator[None]:
    """Keep what is at the path beside it until the context has put something new there; only a file is replaced at once."""
    old = _beside(path, "replaced")
    _remove(old)
    if needed and os.path.lexists(path):
        path.rename(old)
    try:
        yield
    except BaseException:
        put_back(path)
        raise
    with tolerate_removal(old):
        _remove(old)


def _refuse_foreign_folder(path: Path) -> None:
    if path.is_dir() and not (path / REST).is_file() and any(path.iterdir()):
        raise IsADirectoryError(f"{path} is a folder, and no checkpoint that could be replaced. Choose another path.")


def _remove(path: Path) -> None:
    if _is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f".{path.name}.{ending}")
