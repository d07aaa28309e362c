"""`python -m imagegen.benchmark <sub-command> key=value …`; alone, it lists the sub-commands.

A sub-command is a module of this package with a `main()`, a line in `COMMANDS` and a configuration
`conf/benchmark_<sub-command>.yaml`.
"""

from __future__ import annotations

import difflib
import importlib
import sys

COMMANDS = {
    "generate": "images a second, latency and memory of generation, beside cached softmax",
    "train": "time and memory of a training step of a whole model",
    "peer": "both against pytorch-fast-transformers, as ratios",
    "scaling": "time and memory of a training step against the length of the sequence",
}


def usage() -> str:
    """What `--help` prints: a line for each sub-command."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "Measure this machine; each result is JSON and tables, and a plot where one helps.",
            "",
            "  python -m imagegen.benchmark <sub-command> key=value …",
            "",
            *lines,
            "",
            "python -m imagegen.benchmark <sub-command> --help lists its options.",
        ]
    )


def main() -> int:
    """Run the sub-command that the first argument names; returns the exit status."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        meant = f"did you mean {near[0]}? " if near else ""
        print(
            f"error: there is no benchmark {name!r}; {meant}choose one of {', '.join(COMMANDS)}.",
            file=sys.stderr,
        )
        return 1
    sys.argv[1:] = rest
    importlib.import_module(f"imagegen.benchmark.{name}").main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
