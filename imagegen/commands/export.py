"""Write a model as safetensors or ONNX: `imagegen export ckpt=… out=…`."""

from __future__ import annotations

from omegaconf import DictConfig

from imagegen.cli.entry import hydra_entry


@hydra_entry("export")
def main(config: DictConfig) -> None:
    """Command-line entry."""
    from imagegen.checkpoint.export import run

    run(config)
