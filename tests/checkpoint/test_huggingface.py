"""Hugging Face's weights in and out, against what transformers itself writes and reads."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
import safetensors
import torch
from lightning.fabric import Fabric
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeForCausalLM
from transformers.utils.hub import convert_file_size_to_int

from helpers.models import batch, full, qwen3_moe
from helpers.processes import run
from lightning_moe import ChunkedEPStrategy, load_huggingface, save_huggingface
from lightning_moe.checkpoint import safetensors as reading
from lightning_moe.checkpoint import to_huggingface as writing


def equal(model: torch.nn.Module, expected: torch.nn.Module) -> bool:
    weights = dict(expected.named_parameters())
    different = [name for name, p in model.named_parameters() if not torch.equal(full(p), weights[name])]
    return not different


@pytest.mark.parametrize("apart", [True, False], ids=["per-expert", "stacked"])
@pytest.mark.parametrize("shard_size", ["10KB", "1GB"])
def test_what_transformers_saves_is_loaded(apart, shard_size, tmp_path):
    saved = qwen3_moe(torch.float32, seed=1)
    saved.save_pretrained(tmp_path, max_shard_size=shard_size, save_original_format=apart)
    names = {name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
    assert ("model.layers.0.mlp.experts.3.up_proj.weight" in names) == apart
    model = qwen3_moe(torch.float32)
    load_huggingface(model, tmp_path)
    assert equal(model, saved)


@pytest.mark.parametrize("limit", [10_000, "0.01 GB"])
def test_transformers_loads_what_one_process_saves(limit, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    for dtype, tied in ((torch.bfloat16, True), (torch.float32, False)):
        model = qwen3_moe(dtype, seed=2, tie_word_embeddings=tied)
        save_huggingface(model, tmp_path, limit if tied else 10**9)  # the second export replaces the first
        loaded, info = Qwen3MoeForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert equal(loaded, model)
        assert loaded.dtype == dtype
    assert torch.equal(loaded(batch(0)).logits, model(batch(0)).logits)
    assert {file.name for file in tmp_path.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
    }


class CountingSlice:
    """Counts the values that are read."""

    read = 0

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __getitem__(self, index):
        value = self.inner[index]
        CountingSlice.read += value.numel()
        return value


def in_and_out(world_size, ep_size, sizes, saved, out):
    """Load before and after the set-up and on the meta device; save; what each rank read and wrote."""
    open_ = reading.Tensors._open

    def counting_open(self, file, names):
        open_(self, file, names)
        self._slices = {key: CountingSlice(getattr(s, "inner", s)) for key, s in self._slices.items()}

    reading.Tensors._open = counting_open
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=ChunkedEPStrategy(ep_size))
    fabric.launch()
    expected = qwen3_moe(torch.float32, seed=1, **sizes)

    before = qwen3_moe(torch.float32, **sizes)
    load_huggingface(before, saved)
    assert equal(fabric.setup(before).module, expected)

    with torch.device("meta"):
        due = qwen3_moe(torch.float32, **sizes)
    load_huggingface(due, saved)
    due = copy.deepcopy(due)
    assert all(p.is_meta for p in due.parameters())
    due = fabric.setup(due)
    assert equal(due.module, expected)
    with torch.no_grad():
        due(input_ids=batch(9))

    model = qwen3_moe(torch.float32, **sizes)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    CountingSlice.read = 0
    load_huggingface(model, saved)
    read = CountingSlice.read
    assert equal(model.module, expected)

    ids = batch(fabric.global_rank)
    fabric.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    written: list[int] = []
    save = writing.imported("save_file")

    def counting_save(tensors, file, metadata):
        written.append(sum(tensor.numel() for tensor in tensors.values()))
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 20_000
        save(tensors, file, metadata)

    writing.imported = lambda name: counting_save
    save_huggingface(model, out, max_shard_size=20_000)
    with torch.no_grad():
        logits = model(input_ids=batch(9)).logits
    return read, sum(written), logits, {name: full(p) for name, p in model.module.named_parameters()}


@pytest.mark.parametrize(
    ("world_size", "ep_size", "sizes"),
    [
        (4, 2, {}),
        (3, 1, {"hidden_size": 14, "moe_intermediate_size": 13}),
    ],  # in the second nothing divides by the ranks
    ids=["ep2-edp2", "uneven"],
)
def test_each_rank_reads_and_writes_its_share(world_size, ep_size, sizes, tmp_path):
    """And transformers makes of what they write the same logits."""
    plain = qwen3_moe(torch.float32, seed=1, **sizes)
    plain.save_pretrained(tmp_path / "in")
    total = sum(p.numel() for p in plain.parameters())
    options = (world_size, ep_size, sizes, str(tmp_path / "in"), str(tmp_path / "out"))
    results = run(in_and_out, world_size, *options, init=False)
    assert sum(read for read, *_ in results) == sum(written for _, written, *_ in results) == total
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * total
    loaded = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "out", experts_implementation="eager")
    for read, written, logits, weights in results:
        assert 0.7 < read / total * world_size < 1.3
        assert 0.6 < written / total * world_size < 1.4
        assert all(torch.equal(weights[name], p) for name, p in loaded.named_parameters())
        assert not torch.equal(weights["lm_head.weight"], plain.lm_head.weight)
        torch.testing.assert_close(loaded(batch(9)).logits, logits, rtol=1e-5, atol=1e-6)


def truncate(folder: Path) -> str:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return rf"{file}.* cut short"


def foreign(folder: Path) -> str:
    (folder / "model.safetensors").write_bytes(b"no weights at all")
    return rf"{folder / 'model.safetensors'} is damaged"


def empty(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    return rf"{folder} holds no model.safetensors and no model.safetensors.index.json"


def lose_a_file(folder: Path) -> str:
    qwen3_moe(torch.float32).save_pretrained(folder, max_shard_size="20KB")
    lost = sorted(folder.glob("model-*.safetensors"))[1]
    lost.unlink()
    return rf"{lost} is missing"


def change(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")


def another_shape(folder: Path) -> str:
    change(folder, **{"model.layers.1.mlp.experts.7.up_proj.weight": torch.zeros(24, 8)})
    return r"`model.layers.1.mlp.experts.7.up_proj.weight` has shape \[24, 8\] instead of \[24, 16\]"


def quantize(folder: Path) -> str:
    change(folder, **{"lm_head.weight": torch.zeros(32, 16, dtype=torch.float8_e4m3fn)})
    return r"`lm_head.weight` is quantized \(F8_E4M3\)"


def lose_a_tensor(folder: Path) -> str:
    change(folder, **{"model.layers.1.mlp.experts.7.up_proj.weight": None})
    return r"lack `model.layers.1.mlp.experts.7.up_proj.weight`"


def add_a_tensor(folder: Path) -> str:
    change(folder, extra=torch.zeros(1))
    return r"have `extra`, which it has not"


DAMAGES = [truncate, foreign, empty, lose_a_file, another_shape, quantize, lose_a_tensor, add_a_tensor]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_what_does_not_fit_is_an_error_that_names_it(damage, tmp_path):
    qwen3_moe(torch.float32, seed=1).save_pretrained(tmp_path)
    message = damage(tmp_path)
    model, untouched = qwen3_moe(torch.float32), qwen3_moe(torch.float32)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        load_huggingface(model, tmp_path)
    assert re.search(str(tmp_path), str(error.value))
    assert equal(model, untouched)


def test_without_strictness_what_is_there_is_loaded(tmp_path):
    saved = qwen3_moe(torch.float32, seed=1)
    saved.save_pretrained(tmp_path)
    change(tmp_path, **{"lm_head.weight": None, "extra": torch.zeros(1)})
    model = qwen3_moe(torch.float32)
    head = model.lm_head.weight.clone()
    load_huggingface(model, tmp_path, strict=False)
    assert torch.equal(model.lm_head.weight, head)
    assert equal(model.model, saved.model)


def test_weights_that_are_due_keep_a_model_from_running(tmp_path):
    """Only this strategy loads them when it sets the model up."""
    saved = qwen3_moe(torch.float32, seed=1)
    saved.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = qwen3_moe(torch.float32)
    load_huggingface(model, tmp_path)
    model = copy.deepcopy(model).to_empty(device="cpu")
    with pytest.raises(
        RuntimeError, match=rf"{tmp_path} are still due.*`ChunkedEPStrategy` .*`load_huggingface` again"
    ):
        model(input_ids=batch(0))
    load_huggingface(model, tmp_path)
    model.model.rotary_emb = saved.model.rotary_emb  # buffers that no file has
    assert torch.equal(model(input_ids=batch(0)).logits, saved(input_ids=batch(0)).logits)


def test_submodules_that_torch_compile_wrapped(tmp_path):
    saved = qwen3_moe(torch.float32, seed=1)
    saved.save_pretrained(tmp_path / "in")
    model = qwen3_moe(torch.float32)
    model.model.layers[1] = torch.compile(model.model.layers[1])
    load_huggingface(model, tmp_path / "in")
    save_huggingface(model, tmp_path / "out")
    loaded, info = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert equal(loaded, saved)


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "5", "5 apples", "GB", "0GB"])
def test_what_is_no_size_is_refused(size, tmp_path):
    with pytest.raises(ValueError, match=f"`max_shard_size` to be .* but got {size!r}"):
        save_huggingface(qwen3_moe(torch.float32), tmp_path / "out", size)
    assert not (tmp_path / "out").exists()


def test_sizes_are_those_of_transformers():
    for size in (7, "5GB", "20MB", "3KB", "1GiB", "20MiB", "3KiB"):
        assert writing._num_bytes(size) == convert_file_size_to_int(size)


def fail_to_write(out):
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ChunkedEPStrategy())
    fabric.launch()
    model = fabric.setup(qwen3_moe(torch.float32))

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if fabric.global_rank == 1:
        writing.imported = lambda name: full_disk
    try:
        save_huggingface(model, out, max_shard_size=1000)
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def test_a_rank_that_cannot_write_fails_on_all(tmp_path):
    zero, one = run(fail_to_write, 2, str(tmp_path), init=False)
    assert one == "OSError: [Errno 28] No space left on device"
    assert zero == "RuntimeError: Rank 1 failed: OSError: [Errno 28] No space left on device"
    assert not list(tmp_path.iterdir())


def test_what_is_no_hugging_face_model_is_refused(tmp_path):
    with pytest.raises(TypeError, match="has no `config`.*`lightning_module.model`"):
        save_huggingface(torch.nn.Linear(2, 2), tmp_path)
    with pytest.raises(TypeError, match="meta device"), torch.device("meta"):
        save_huggingface(qwen3_moe(torch.float32), tmp_path)


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install safetensors"):
        save_huggingface(qwen3_moe(torch.float32), tmp_path)
    assert safetensors is not None
