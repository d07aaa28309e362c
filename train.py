"""Train an autoregressive image model: `python train.py --help`."""

from __future__ import annotations

from omegaconf import DictConfig

from imagegen.cli import hydra_entry
from imagegen.resume import refuse_used_folder, rewrite_resume


@hydra_entry("train", rewrite=rewrite_resume, check=refuse_used_folder)
def main(config: DictConfig) -> None:
    """Train into the run folder."""
    from imagegen.run import train

    train(config)


if __name__ == "__main__":
    main()
