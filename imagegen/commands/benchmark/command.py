"""`imagegen benchmark <sub-command> key=value …`; alone, it lists the sub-commands.

A sub-command is a module of this package with a `main()`, a line in `COMMANDS` and a configuration
`conf/benchmark_<sub-command>.yaml`.
"""

from __future__ import annotations

from imagegen.commands.registry import Command, choose
from imagegen.core.installation import typed

COMMANDS = {
    name: Command(f"benchmark.{name}", what)
    for name, what in {
        "generate": "images per second, latency and memory of generation, beside cached softmax",
        "train": "time and memory of a training step of a whole model",
        "peer": "both against pytorch-fast-transformers, as ratios",
        "scaling": "time and memory of a training step against the length of the sequence",
    }.items()
}


def main() -> int:
    """Run the sub-command that the first argument names; returns the exit status."""
    program = typed("benchmark")
    head = (
        "Measure this machine; each result is JSON and tables, and a plot where one helps.\n\n"
        f"  {program} <sub-command> key=value …"
    )
    foot = f"{program} <sub-command> --help lists its options."
    return choose(program, COMMANDS, head, foot, kind="benchmark")
