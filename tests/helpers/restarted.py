"""A training for ``torchrun --max-restarts 1``: first, rank 1 is killed in the middle of the last step but one."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric

from helpers.models import computing_in, qwen3_moe
from helpers.training import LEARNING_RATE, MAX_NORM, STEPS, my_share
from lightning_moe import ChunkedEPStrategy


def main(folder: Path) -> None:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ChunkedEPStrategy(), precision="64-true")
    fabric.launch()
    (folder / f"{attempt}-{fabric.global_rank}.pid").write_text(str(os.getpid()))
    model = qwen3_moe(torch.float32)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), LEARNING_RATE))
    state = {"model": model, "optimizer": optimizer, "step": 0, "losses": []}
    if attempt:
        fabric.load(folder / "checkpoint", state)
    with computing_in(torch.float64):
        for ids in my_share(1, fabric.global_rank, 2)[state["step"] :]:
            loss = model(input_ids=ids, labels=ids).loss
            if (attempt, fabric.global_rank, state["step"]) == (0, 1, STEPS - 2):
                os.kill(os.getpid(), signal.SIGKILL)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
            state["losses"].append(fabric.all_reduce(loss.detach()).item())
            if state["step"] % 2:
                fabric.save(folder / "checkpoint", state)
    if fabric.global_rank == 0:
        (folder / "losses.json").write_text(json.dumps(state["losses"]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
