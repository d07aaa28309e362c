"""Restore stored images: `imagegen decompress ckpt=… file=FILE out=FOLDER`."""

from __future__ import annotations

from omegaconf import DictConfig

from imagegen.cli.entry import hydra_entry


@hydra_entry("decompress")
def main(config: DictConfig) -> None:
    """Command-line entry."""
    from imagegen.evaluation.codec import decompress

    decompress(config)
