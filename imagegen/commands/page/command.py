"""Open a web page that draws with a model: `imagegen page ckpt=…`."""

from __future__ import annotations

from omegaconf import DictConfig

from imagegen.cli.entry import hydra_entry


@hydra_entry("page")
def main(config: DictConfig) -> None:
    """Serve the page until Ctrl-C."""
    from imagegen.commands.page.server import run

    run(config)
