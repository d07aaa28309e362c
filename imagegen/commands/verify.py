"""Check a checkpoint: `imagegen verify ckpt=…`."""

from __future__ import annotations

from omegaconf import DictConfig

from imagegen.cli.entry import hydra_entry


@hydra_entry("verify")
def main(config: DictConfig) -> None:
    """Command-line entry."""
    from imagegen.evaluation.verification import run

    if not run(config)["ok"]:
        raise SystemExit(1)
