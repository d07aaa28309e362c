"""Train an autoregressive image model: `imagegen train --help`, or `python train.py --help`."""

from __future__ import annotations

import logging
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from imagegen.cli.entry import hydra_entry
from imagegen.cli.resume import rewrite_resume
from imagegen.core.memory import keep_freed_memory
from imagegen.training.processes import require_one_folder
from imagegen.training.run_folder import refuse_used_folder, remove_if_unused


def rewrite(argv: list[str]) -> list[str]:
    """The arguments typed, with what `resume=` means."""
    return require_one_folder(rewrite_resume(argv))


@hydra_entry("train", rewrite=rewrite, check=refuse_used_folder)
def main(config: DictConfig) -> float | None:
    """Train into the run folder; a sweep looks for the lowest validation bits/dim."""
    try:
        from imagegen.training.run import train
    except KeyboardInterrupt:
        # Importing takes seconds. PyTorch would log what it has in its caches.
        logging.disable()
        remove_if_unused(Path(HydraConfig.get().runtime.output_dir))
        raise

    best: float | None = train(config)["best_bits_per_dim"]
    return best


def command() -> None:
    """Command-line entry of a process that does nothing else."""
    keep_freed_memory()
    main()


if __name__ == "__main__":
    command()
