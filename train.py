"""Train an autoregressive image model: `python train.py --help`."""

from imagegen.commands.train import command, main

__all__ = ["main"]

if __name__ == "__main__":
    command()
