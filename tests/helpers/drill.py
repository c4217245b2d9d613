"""A training that is killed, goes on with fewer devices, and is given to transformers; started by torchrun or alone.

``python drill.py ACCELERATOR FOLDER [RANK]``: the process of RANK is killed in the middle of its last step but one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric

from helpers.models import batch, computing_in, qwen3_moe
from helpers.training import LEARNING_RATE, MAX_NORM, STEPS, my_share
from lightning_moe import ChunkedEPStrategy, save_huggingface


def main(accelerator: str, folder: Path, killed: int | None) -> None:
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    fabric = Fabric(accelerator=accelerator, devices=world_size, strategy=ChunkedEPStrategy(), precision="64-true")
    fabric.launch()
    (folder / f"{fabric.global_rank}.pid").write_text(str(os.getpid()))
    model = qwen3_moe(torch.float32)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), LEARNING_RATE))
    state = {"model": model, "optimizer": optimizer, "step": 0, "losses": []}
    if (folder / "checkpoint").exists():
        fabric.load(folder / "checkpoint", state)
    with computing_in(torch.float64):
        for ids in my_share(1, fabric.global_rank, world_size)[state["step"] :].to(fabric.device):
            loss = model(input_ids=ids, labels=ids).loss
            if fabric.global_rank == killed and state["step"] == STEPS - 2:
                os.kill(os.getpid(), signal.SIGKILL)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
            state["losses"].append(fabric.all_reduce(loss.detach()).item())
            if state["step"] % 2:
                fabric.save(folder / "checkpoint", state)
        with torch.no_grad():
            logits = model(input_ids=batch(9).to(fabric.device)).logits
    save_huggingface(model, folder / "exported")
    if fabric.global_rank == 0:
        torch.save(logits.cpu(), folder / "logits.pt")
        (folder / "losses.json").write_text(json.dumps(state["losses"]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
