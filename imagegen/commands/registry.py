"""The command `imagegen`: its first word chooses what is done, the others are options of that."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import imagegen


@dataclass(frozen=True)
class Command:
    """A command, imported when it is chosen.

    Attributes:
        module: in `imagegen.commands`.
        what: a line for the help.
        function: of the module; takes its options from `sys.argv`.
        hydra: whether its options are Hydra's, which completes them.
    """

    module: str
    what: str
    function: str = "main"
    hydra: bool = True


COMMANDS = {
    "train": Command("train", "train a model", "command"),
    "sample": Command("sample", "draw images, or complete partial ones"),
    "evaluate": Command("evaluate", "score a model on a split: bits/dim, accuracy"),
    "compress": Command("compress", "store images without loss"),
    "decompress": Command("decompress", "restore compressed images"),
    "export": Command("export", "write a model as safetensors or ONNX"),
    "page": Command("page.command", "open a web page: draw, erase, watch the model fill in"),
    "verify": Command("verify", "check that a model is correct"),
    "runs": Command("runs", "list runs, the best first", hydra=False),
    "find-lr": Command("find_lr", "look for a learning rate"),
    "benchmark": Command("benchmark.command", "measure this machine"),
    "machine": Command("machine", "what this machine can do", hydra=False),
}

HEAD = """\
Autoregressive image models with linear attention.

  imagegen COMMAND key=value …"""

FOOT = """\
imagegen COMMAND --help lists the options of a command. Data are in data/ and runs in outputs/:
in the clone if it is installed with pip install -e, otherwise in the working directory.
eval "$(imagegen -sc install=bash)" lets bash complete commands and options."""


def main() -> int:
    """Run the command typed; returns the exit status."""
    if sys.argv[1:] == ["--version"]:
        print(f"imagegen {imagegen.__version__}")
        return 0
    return choose("imagegen", COMMANDS, HEAD, FOOT)


def choose(
    program: str, commands: Mapping[str, Command], head: str, foot: str, kind: str = "command"
) -> int:
    """Run the one of `commands` that the first argument names; returns the exit status.

    Args:
        program: what is typed before that argument.
        commands: by name.
        head, foot: what the help says before and after the list of commands.
        kind: what one of them is called.
    """
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        width = max(map(len, commands))
        lines = [f"  {name:{width}}  {command.what}" for name, command in commands.items()]
        print("\n".join([head, "", *lines, "", foot]))
        return 0
    completing = _COMPLETION & {name, *rest}
    if name in _COMPLETION:
        found = _command_to_complete(commands, rest)
        if found is None:
            return 0
        name, rest = found, [*completing, *rest]
    if name not in commands:
        near = difflib.get_close_matches(name, commands, 1)
        meant = f"did you mean {near[0]}? " if near else ""
        print(
            f"error: there is no {kind} {name!r}; {meant}choose one of {', '.join(commands)}.",
            file=sys.stderr,
        )
        return 1
    # Hydra's completion is for the program of that name, whatever its sub-commands.
    sys.argv = ["imagegen" if completing else f"{program} {name}", *rest]
    command = commands[name]
    module = importlib.import_module(f"imagegen.commands.{command.module}")
    status: int | None = getattr(module, command.function)()
    return status or 0


_COMPLETION = {"-sc", "--shell_completion"}


def _command_to_complete(commands: Mapping[str, Command], how: list[str]) -> str | None:
    """The command whose options a shell wants to complete; None where nothing is left to do.

    Hydra completes the line in COMP_LINE and knows no sub-commands, so that word is taken out.
    """
    if not any(text.startswith("query=") for text in how):
        return next(iter(commands))  # Hydra's script is the same for all.
    found = re.match(r"(\s*\S+)\s+(\S+)(\s.*)", os.environ.get("COMP_LINE", ""))
    if found is None:
        print("\n".join(commands))
        return None
    os.environ["COMP_LINE"] = found[1] + found[3]
    return found[2] if found[2] in commands and commands[found[2]].hydra else None
