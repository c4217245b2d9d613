"""Ranks that were given different things end with an error that names them, on every rank, where they would have hung."""

from __future__ import annotations

import importlib.metadata
import warnings

import torch
from lightning.fabric import Fabric

from helpers.models import batch, qwen3_moe
from helpers.processes import run
from lightning_moe import ChunkedEPStrategy
from lightning_moe._version import __version__ as VERSION
from lightning_moe.strategies import agreement, environment


def launched(precision="32-true", **arguments) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ChunkedEPStrategy(**arguments), precision=precision)
    fabric.launch()
    return fabric


def hooked(model):
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)


def frozen(model):
    model.model.embed_tokens.requires_grad_(False)


ARGUMENTS = {
    "chunks": ({"num_chunks": 2}, {"num_chunks": 3, "recompute": "full"}),
    "size": ({"expert_parallel_size": 1}, {"expert_parallel_size": 2}),
    "precision": ({}, {"precision": "bf16-mixed"}),
}
MODELS = {  # rank 1's; rank 0 has the plain one
    "width": lambda: qwen3_moe(torch.float32, moe_intermediate_size=32),
    "depth": lambda: qwen3_moe(torch.float32, num_hidden_layers=3),
    "dtype": lambda: qwen3_moe(torch.bfloat16),
    "frozen": lambda: (model := qwen3_moe(torch.float32), frozen(model))[0],
    "refused": lambda: (model := qwen3_moe(torch.float32), hooked(model))[0],
}


def error_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


def disagree():
    rank = launched().global_rank
    found = {name: error_of(launched, **by_rank[rank]) for name, by_rank in ARGUMENTS.items()}
    if rank == 1:
        agreement.__version__ = "0.0.1"
    found["versions"] = error_of(launched)
    agreement.__version__ = VERSION
    for name, build in MODELS.items():
        model = build() if rank == 1 else qwen3_moe(torch.float32)
        found[name] = error_of(launched().setup, model)

    if rank == 1:
        environment.check_versions = lambda: ["something is old"]
    fabric, shown = launched(), []
    for seed in (rank, 7):  # values and data may differ
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = fabric.setup(qwen3_moe(torch.float32, seed=seed))
        shown.append([str(warning.message) for warning in caught if "something" in str(warning.message)])
        fabric.backward(model(input_ids=batch(rank), labels=batch(rank)).loss)
    return found, shown


def test_what_differs_is_named_on_every_rank():
    (first, shown), (second, silent) = run(disagree, 2, init=False, timeout=200)
    expected = {
        "chunks": ["`num_chunks` is 2 on rank 0 and 3 on rank 1", "`recompute` is RecomputePolicy", "same arguments"],
        "size": ["`expert_parallel_size` is 1 on rank 0 and 2 on rank 1"],
        "precision": ["`precision` is '32-true' on rank 0 and 'bf16-mixed' on rank 1"],
        "versions": [f"lightning_moe is {VERSION} on rank 0 and 0.0.1 on rank 1", "same versions"],
        "width": [
            "mlp.experts.gate_up_proj` is (8, 48, 16) torch.float32 on rank 0 and (8, 64, 16) torch.float32 on rank 1"
        ],
        "depth": [
            "`model.layers.2.self_attn.q_proj.weight` is missing on rank 0 and (16, 16)",
            "and so on: 1",
            "same model",
        ],
        "dtype": [
            "`model.embed_tokens.weight` is (32, 16) torch.float32 on rank 0 and (32, 16) torch.bfloat16 on rank 1"
        ],
        "frozen": [
            "`model.embed_tokens.weight` is (32, 16) torch.float32 on rank 0 and (32, 16) torch.float32 frozen on"
        ],
    }
    for name, parts in expected.items():
        assert first[name] == second[name], name
        assert all(part in first[name] for part in parts), first[name]
    assert "num_layers" not in first["chunks"]
    assert "it has hooks" in second["refused"]
    assert first["refused"] == f"Rank 1 failed: ValueError: {second['refused']}"
    assert shown == [["something is old (on rank 1)"]] * 2
    assert silent == [[], []]


# --- the environment


def test_variables():
    good = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    assert list(environment.check_variables(good)) == []
    assert list(environment.check_variables({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})) == []
    serial, allocator = environment.check_variables({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert "Unset it" in serial
    assert "`PYTORCH_ALLOC_CONF=expandable_segments:True`" in allocator


def test_placement(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    (spans,) = environment.check_placement([("a", 0), ("a", 1), ("a", 2), ("b", 0)], cpu)
    assert "4 ranks spans the hosts a, b" in spans
    asked = []
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: asked.append(peer) or peer != 3)
    assert list(environment.check_placement([("a", 0), ("a", 1)], gpu)) == []
    (apart,) = environment.check_placement([("a", 0), ("a", 1), ("a", 3)], gpu)
    assert "nvidia-smi topo -p2p r" in apart
    assert asked == [1, 1, 3], "a GPU is not asked about itself"
    assert list(environment.check_placement([("a", 0), ("a", 1)], cpu)) == []


def test_versions(monkeypatch):
    assert list(environment.check_versions()) == []
    real = importlib.metadata.version
    installed = {"deep_ep": "2.5.0", "torch": "2.10.0"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed.get(name) or real(name))
    assert [problem.split(" is installed")[0] for problem in environment.check_versions()] == [
        "torch 2.10.0",
        "deep_ep 2.5.0",
    ]
    monkeypatch.undo()
    (old,) = environment.check_versions(["torch>=1000", "not-installed<2", "pytest<1; extra == 'test'"])
    assert f"torch {torch.__version__} is installed" in old
    assert "torch >=1000" in old
