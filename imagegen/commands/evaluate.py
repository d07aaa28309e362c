"""Score a checkpoint on a split: `imagegen evaluate ckpt=… split=test out=FILE.json`."""

from __future__ import annotations

from omegaconf import DictConfig

from imagegen.cli.entry import hydra_entry


@hydra_entry("evaluate")
def main(config: DictConfig) -> None:
    """Command-line entry."""
    from imagegen.evaluation.scores import run

    run(config)
