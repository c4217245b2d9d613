"""The command line of the benchmarks."""

from __future__ import annotations

import argparse

from lightning_moe.bench import op


def main() -> None:
    """Run the benchmark that the first argument names."""
    parser = argparse.ArgumentParser(prog="python -m lightning_moe.bench", description=__doc__)
    commands = parser.add_subparsers(required=True)
    op.add_arguments(commands.add_parser("op", help="one layer's routed experts: time and memory against the floor"))
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
