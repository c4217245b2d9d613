"""Whether autograd is at work."""

from __future__ import annotations

import torch


def in_backward() -> bool:
    """Whether this thread runs a backward: then a forward is somebody's recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)
