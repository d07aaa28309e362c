"""Store images without loss: `imagegen compress ckpt=… out=FILE`."""

from __future__ import annotations

from omegaconf import DictConfig

from imagegen.cli.entry import hydra_entry


@hydra_entry("compress")
def main(config: DictConfig) -> None:
    """Command-line entry."""
    from imagegen.evaluation.codec import compress

    compress(config)
