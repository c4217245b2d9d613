"""Doctests are collected from the source, but for kernels where Triton is not installed."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["lightning_moe/ops/kernels/*"]
