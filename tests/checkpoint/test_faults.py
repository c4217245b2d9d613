"""Checkpoints that are damaged, foreign, malicious or of something else: an error that names the file, and nothing changed."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric import Fabric

from helpers.models import qwen3_moe
from helpers.processes import run
from helpers.training import my_share
from lightning_moe import ChunkedEPStrategy
from lightning_moe.checkpoint import load as loading
from lightning_moe.ops.local import local_part


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


class Touch:
    """Pickled, it runs a command when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def poison_index(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Touch(folder.parent / "executed")))


def poison_entry(folder: Path) -> None:
    """In the shard, where the learning rate is."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    key = next(key for key in index.storage_data if key.fqn == "optimizer.param_groups.0.lr")
    (folder / "poison").write_bytes(b"")
    torch.save(Touch(folder.parent / "executed"), folder / "poison")
    index.storage_data[key].relative_path, index.storage_data[key].offset = "poison", 0
    index.storage_data[key].length = (folder / "poison").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def leave_the_folder(folder: Path) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(index.storage_data.values())).relative_path = "../file"
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def garble_tensor(folder: Path) -> None:
    """All bytes are there, and they are no tensors."""
    shard = folder / "__1_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))


FOLDER = {
    "a shard cut short": (lambda p: cut(p / "__1_0.distcp"), r"__1_0.distcp is cut short: it has \d+ bytes"),
    "a shard missing": (lambda p: (p / "__1_0.distcp").unlink(), r"__1_0.distcp is missing"),
    "garbage in a shard": (garble_tensor, r"{path} cannot be loaded"),
    "index cut short": (lambda p: cut(p / ".metadata"), r"\.metadata is damaged"),
    "index missing": (lambda p: (p / ".metadata").unlink(), r"{path} is no checkpoint.*it has no \.metadata"),
    "an index of something else": (
        lambda p: (p / ".metadata").write_bytes(pickle.dumps([1])),
        r"\.metadata is damaged, or no",
    ),
    "an index that runs a command": (poison_index, r"names `posix.system`"),
    "an entry that runs a command": (poison_entry, r"cannot be loaded.*Weights only"),
    "an index that points elsewhere": (leave_the_folder, r"which is not in the folder"),
    "the rest cut short": (lambda p: cut(p / "meta.pt"), r"meta.pt is cut short"),
    "the rest missing": (lambda p: (p / "meta.pt").unlink(), r"it has no meta\.pt"),
    "another folder": (lambda p: (shutil.rmtree(p), p.mkdir()), r"{path} is no checkpoint"),
    "nothing": (shutil.rmtree, r"There is no checkpoint at {path}"),
}
FILE = {
    "cut short": (cut, r"{path} is cut short"),
    "empty": (lambda p: p.write_bytes(b""), r"{path} is cut short, or was not written by `torch.save`"),
    "text": (lambda p: p.write_text("hello"), r"was not written by `torch.save`"),
    "a tensor": (lambda p: torch.save(torch.ones(3), p), r"{path} is no checkpoint: it holds a `Tensor`"),
    "other keys": (lambda p: torch.save({"net": {}}, p), r"{path} holds no model under the key 'model': it has 'net'"),
    "code": (
        lambda p: torch.save(Touch(p.parent / "executed"), p),
        r"{path} holds objects that only pickle can restore",
    ),
}


def state_of(model, optimizer):
    """This rank's own part of it."""
    state = [value for entries in optimizer.state.values() for value in entries.values()]
    return [local_part(value.detach()).clone() for value in (*model.parameters(), *state)]


def train(seed, optimizer_class=torch.optim.AdamW, sharded=True, **overrides):
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ChunkedEPStrategy(2, save_distributed_checkpoint=sharded))
    fabric.launch()
    model = qwen3_moe(torch.float32, seed=seed, **overrides)
    model, optimizer = fabric.setup(model, optimizer_class(model.parameters(), lr=1e-2))
    ids = my_share(1, fabric.global_rank, 2)[0]
    fabric.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    optimizer.zero_grad()
    return fabric, {"model": model, "optimizer": optimizer}


def attempt(fabric, path, state):
    """Load; return what was said, and whether everything is as it was."""
    before = state_of(state["model"].module, state["optimizer"])
    try:
        fabric.load(path, state)
        said = "loaded"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    after = state_of(state["model"].module, state["optimizer"])
    return said, all(map(torch.equal, before, after))


def try_all(folder: str):
    folder = Path(folder)
    fabric, state = train(1)
    fabric.save(folder / "folder", state)
    train(1, sharded=False)[0].save(folder / "file", state)
    fresh_fabric, fresh = train(2)
    said = {}
    for kind, damages in ("folder", FOLDER), ("file", FILE):
        for name, (damage, _) in damages.items():
            path = folder / "damaged"
            fabric.barrier()
            if fabric.global_rank == 0:
                (shutil.copytree if kind == "folder" else shutil.copy)(folder / kind, path)
                damage(path)
            fabric.barrier()
            said[kind, name] = attempt(fresh_fabric, path, fresh)
            fabric.barrier()
            if fabric.global_rank == 0 and path.exists():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        wide = train(2, moe_intermediate_size=32)[1]
        said[kind, "another model"] = attempt(fresh_fabric, folder / kind, wide)
        deep = train(2, num_hidden_layers=3)[1]
        said[kind, "more layers"] = attempt(fresh_fabric, folder / kind, deep)
        said[kind, "another optimizer"] = attempt(fresh_fabric, folder / kind, train(2, torch.optim.SGD)[1])
        fewer = train(2)[1]
        fewer["optimizer"].param_groups[0]["params"].pop()
        said[kind, "other parameters"] = attempt(fresh_fabric, folder / kind, fewer)

        def fail(*args):
            raise OSError("cannot read")

        opening, loading.open_source = loading.open_source, fail if dist.get_rank() == 1 else loading.open_source
        said[kind, "one rank alone"] = attempt(fresh_fabric, folder / kind, fresh)
        loading.open_source = opening
        said[kind, "undamaged"] = attempt(fresh_fabric, folder / kind, fresh)
        fresh = train(2)[1]
    return said


OTHERS = {
    "another model": r"It does not fit the `Qwen3MoeForCausalLM`: `[\w.]+.experts.down_proj` has shape \[8, 16, 24\] instead",
    "more layers": r"it lacks `model.layers.2.input_layernorm.weight`, .* and \d+ more. To load",
    "another optimizer": r"The optimizer was another one than the `SGD` here: its groups have 'amsgrad'",
    "other parameters": r"The parameter groups are not those of the `AdamW` here",
}


def test_training_is_untouched_and_the_file_is_named(tmp_path):
    zero, one = run(try_all, 2, str(tmp_path), init=False)
    assert not (tmp_path / "executed").exists()
    for kind, damages in ("folder", FOLDER), ("file", FILE):
        for said in zero, one:
            message, untouched = said.pop((kind, "undamaged"))
            assert (message, untouched) == ("loaded", False)
        assert zero.pop((kind, "one rank alone")) == ("RuntimeError: Rank 1 failed: OSError: cannot read", True)
        assert one.pop((kind, "one rank alone")) == ("OSError: cannot read", True)
        for name, pattern in ({name: pattern for name, (_, pattern) in damages.items()} | OTHERS).items():
            path = tmp_path / (kind if name in OTHERS else "damaged")
            message, untouched = zero.pop((kind, name))
            if name != "garbage in a shard":  # there it is rank 1 that cannot read
                assert one[kind, name] == (message, untouched)
            one.pop((kind, name))
            assert re.search(pattern.replace("{path}", re.escape(str(path))), message), f"{kind}, {name}: {message}"
            assert str(path) in message
            assert untouched, f"{kind}, {name}"
    assert not zero
    assert not one


def test_what_torch_writes_today_is_all_known(tmp_path):
    """Every kind of entry that torch's own writer makes passes the reader that trusts nothing."""
    from lightning_moe.checkpoint.metadata import read_index

    dtypes = [
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    ]
    state = {str(dtype): torch.zeros(2, 3, dtype=dtype) for dtype in dtypes}
    state |= {
        "number": 1,
        "text": "a",
        "list": [1, torch.ones(2)],
        "nested": {"deep": {"er": torch.ones(1)}},
        "none": None,
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    assert read_index(tmp_path) == pickle.loads((tmp_path / ".metadata").read_bytes())
