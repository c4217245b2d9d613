"""Train a small Qwen3-MoE on text, byte by byte, with expert parallelism through Lightning Fabric."""

from __future__ import annotations

import time

import torch
from common import last_words, model_config, parser
from lightning.fabric import Fabric
from text import TrainLoader, windows
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import Qwen3MoeForCausalLM

from lightning_moe import ChunkedEPStrategy


def main() -> None:
    args = parser(__doc__).parse_args()
    train_windows, val_windows = windows(args.data, args.window)
    strategy = ChunkedEPStrategy(
        expert_parallel_size=args.expert_parallel_size, num_chunks=args.num_chunks, recompute=args.recompute
    )
    fabric = Fabric(
        strategy=strategy,
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.num_nodes,
        precision=args.precision,
    )
    fabric.launch()
    fabric.seed_everything(args.seed, verbose=False)

    with fabric.init_module(empty_init=True):  # on the meta device: each process allocates only its own shards
        model = Qwen3MoeForCausalLM(model_config())
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(
        torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    )

    train_loader = TrainLoader(train_windows, args.batch_size, args.steps)
    val_loader = fabric.setup_dataloaders(DataLoader(val_windows, args.batch_size))

    state = {"model": model, "optimizer": optimizer, "step": 0}
    if args.resume:
        fabric.load(args.resume, state)
        train_loader.step = state["step"]
    if state["step"] >= args.steps:
        raise SystemExit(f"{args.resume} has {state['step']} steps already: ask for more with `--steps`.")

    model.train()
    started, tokens = time.perf_counter(), 0
    batches = fabric.setup_dataloaders(train_loader)
    bar = tqdm(batches, initial=state["step"], total=args.steps, mininterval=1, disable=not fabric.is_global_zero)
    for ids in bar:
        loss = model(input_ids=ids, labels=ids).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        tokens += ids.numel() * fabric.world_size
        speed = tokens / (time.perf_counter() - started)
        bar.set_postfix_str(f"loss={loss.item():.3f}, tokens/s={speed:.0f}", refresh=False)

    model.eval()
    with torch.no_grad():
        losses = [model(input_ids=ids, labels=ids).loss for ids in val_loader]
    val_loss = fabric.all_reduce(torch.stack(losses).mean())

    checkpoint = f"{args.checkpoint_dir}/fabric-step={state['step']}.ckpt"
    fabric.save(checkpoint, state)
    fabric.print(last_words(val_loss.item(), checkpoint, args))


if __name__ == "__main__":
    main()
