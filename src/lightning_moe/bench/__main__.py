"""The command line of the benchmarks."""

from __future__ import annotations

import argparse

from lightning_moe.bench import memory, offload, op, scaling, step


def main() -> None:
    """Run the benchmark that the first argument names."""
    parser = argparse.ArgumentParser(prog="python -m lightning_moe.bench", description=__doc__)
    commands = parser.add_subparsers(required=True)
    op.add_arguments(commands.add_parser("op", help="one layer's routed experts: time and memory against the floor"))
    memory.add_arguments(commands.add_parser("memory", help="recompute policies: memory and time of a training step"))
    offload.add_arguments(commands.add_parser("offload", help="activation offload: memory and time of a training step"))
    step.add_arguments(
        commands.add_parser("step", help="whole training steps, in chunks against native expert parallelism")
    )
    scaling.add_arguments(
        commands.add_parser("scaling", help="how results of `op` grow with the number of ranks, by a model of it")
    )
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
