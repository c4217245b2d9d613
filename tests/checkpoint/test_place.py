"""A checkpoint in the place of another: whenever the process is killed, one of them is there afterwards."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_moe.checkpoint.load import load_checkpoint, load_weights
from lightning_moe.checkpoint.place import make_way
from lightning_moe.checkpoint.save import packed, save_file, save_folder, state_dicts


class Killed(BaseException):
    pass


def folder(path: Path, model: nn.Module) -> None:
    save_folder(path, state_dicts({"model": model}, False, {})[0], packed({}))


def file(path: Path, model: nn.Module) -> None:
    save_file(path, {"model": model.state_dict()})


def others_file(path: Path, model: nn.Module) -> None:
    with make_way(path):
        torch.save({"model": model.state_dict()}, path)


def loaded(path: Path, like: nn.Linear) -> bool:
    fresh = nn.Linear(2, 2)
    load_checkpoint(path, {"model": fresh}, {})
    return torch.equal(fresh.weight, like.weight)


def kill_at(monkeypatch, number):
    """The ``number``-th change to the file system of this kind is the last: what would clean up after it fails as well."""
    done = []

    def counted(change):
        def wrapper(*args, **kwargs):
            done.append(change)
            if len(done) >= number:
                raise Killed
            return change(*args, **kwargs)

        return wrapper

    for owner, name in (Path, "rename"), (Path, "replace"), (shutil, "rmtree"), (Path, "unlink"):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    return done


@pytest.mark.filterwarnings("ignore:.*single process")
@pytest.mark.parametrize("second", [folder, file, others_file])
@pytest.mark.parametrize("first", [folder, file])
def test_killed_at_any_time(first, second, tmp_path):
    old, new, third = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    for number in range(1, 20):
        path = tmp_path / f"{number}" / "checkpoint"
        first(path, old)
        with pytest.MonkeyPatch.context() as patched:
            done = kill_at(patched, number)
            try:
                second(path, new)
            except Killed:
                killed = True
            else:
                killed = False
        shutil.copytree(path.parent, tmp_path / f"{number}-saved")
        assert loaded(path, old) or loaded(path, new)
        path = tmp_path / f"{number}-saved" / "checkpoint"
        second(path, third)  # straight away, without a load
        assert loaded(path, third)
        assert [left.name for left in path.parent.iterdir()] == ["checkpoint"]
        if not killed:
            assert len(done) == number - 1
            return
    raise AssertionError("it never came to an end")


@pytest.mark.filterwarnings("ignore:.*single process")
def test_between_the_renames_nothing_complete_is_removed(tmp_path, monkeypatch):
    """A save that fails after such a kill leaves the checkpoint from before where it belongs."""
    path, old = tmp_path / "checkpoint", nn.Linear(2, 2)
    folder(path, old)
    path.rename(tmp_path / ".checkpoint.replaced")

    def no_space(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", no_space)
        with pytest.raises(RuntimeError, match=rf"{path} could not be saved: OSError.*No space left"):
            file(path, nn.Linear(2, 2))
    assert path.is_dir()
    assert loaded(path, old)
    path.rename(tmp_path / ".checkpoint.replaced")
    with pytest.raises(FileNotFoundError, match="There is no file at"):
        load_weights(tmp_path / "other", old)
    assert loaded(path, old)


@pytest.mark.filterwarnings("ignore:.*single process")
def test_what_cannot_be_removed_is_no_failure(tmp_path, monkeypatch, caplog):
    path, new = tmp_path / "checkpoint", nn.Linear(2, 2)
    folder(path, nn.Linear(2, 2))

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refuse)
        folder(path, new)
    assert "could not be removed: PermissionError" in caplog.text
    assert loaded(path, new)
