"""Every name of Lightning that the package leans on exists, and no other module of it leans on Lightning."""

from __future__ import annotations

import ast
from pathlib import Path

import lightning_moe
from lightning_moe import _compat

PACKAGE = Path(lightning_moe.__file__).parent


def test_all_names_are_there():
    assert all(getattr(_compat, name) is not None for name in _compat.__all__)


def test_only_compat_imports_lightning():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            used = [
                name for name in names if name.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric")
            ]
            assert not used or path.name == "_compat.py", f"{path} imports {used}"


FLOORS = [
    {"bench"},
    {"strategies"},
    {"parallel"},
    {"checkpoint"},
    {"models"},
    {"callbacks"},
    {"memory"},
    {"layers"},
    {"offload"},
    {"overlap"},
    {"dispatch", "recompute"},
    {"ops", "metrics"},
]


def test_arrows_between_rooms_run_down():
    """A room imports only rooms on lower floors, or modules of its own."""
    floor = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        if room not in floor:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("lightning_moe."):
                continue
            target = node.module.split(".")[1]
            if target in floor and target != room:
                assert floor[target] > floor[room], f"{path} imports {node.module}, which is not below it"
