"""Draw images from a checkpoint, or complete partial ones: `imagegen sample --help`."""

from __future__ import annotations

from omegaconf import DictConfig

from imagegen.cli.entry import hydra_entry


@hydra_entry("sample")
def main(config: DictConfig) -> None:
    """Draw into the folder `out`."""
    from imagegen.generation.job import run

    run(config)


if __name__ == "__main__":
    main()
