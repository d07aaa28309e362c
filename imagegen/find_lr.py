"""Look for a learning rate: `python -m imagegen.find_lr` with the options of `train.py`.

Lightning's learning rate finder (Smith, 2017, section 3.3) trains for some steps while the rate
grows exponentially, and suggests the one at which the loss falls fastest. Nothing is kept.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from imagegen.cli import hydra_entry
from imagegen.errors import UserError
from imagegen.precision import trainer_options

if TYPE_CHECKING:
    from omegaconf import DictConfig

STEPS = 100
LEAST, MOST = 1e-5, 0.3
# Lightning smooths the loss, and the first steps come out too low.
SKIPPED = 10
ROWS = 15

USAGE = """\
Look for a learning rate: train for 100 steps while it grows, and see where the loss falls fastest.

  python -m imagegen.find_lr dataset=mnist model.d_model=256 batch_size=32

takes the options of train.py (python train.py --help); logger, callbacks and limits do nothing."""


def find(cfg: DictConfig) -> tuple[list[tuple[float, float]], float]:
    """(learning rate, smoothed loss) of the later steps, and the rate suggested.

    Args:
        cfg: a composed `conf/train.yaml`.

    Raises:
        UserError: for what cannot be trained, or where no rate stands out.
    """
    from omegaconf import OmegaConf
    from pytorch_lightning import Trainer, seed_everything
    from pytorch_lightning.tuner import Tuner

    from imagegen.build import build
    from imagegen.data.base import ImageDataset
    from imagegen.data.datamodule import ImageDataModule
    from imagegen.model import ImageTransformer
    from imagegen.model_options import model_options
    from imagegen.optimizers import build_optimizer
    from imagegen.run import optimizer_factory, quiet_lightning
    from imagegen.training import ImageModule

    quiet_lightning()
    sections = {key: cfg[key] for key in ("dataset", "model", "attention", "head", "trainer")}
    config: dict[str, Any] = OmegaConf.to_container(OmegaConf.create(sections), resolve=True)  # type: ignore[assignment]
    seed_everything(cfg.seed, workers=True, verbose=False)
    dataset = build(config["dataset"], ImageDataset)
    model = ImageTransformer(dataset.spec, **model_options(config, dataset))
    factory = optimizer_factory(cfg, model)
    rates = {group["lr"] for group in build_optimizer(factory, model).param_groups}
    if len(rates) > 1:
        raise UserError(
            "the finder looks for one learning rate, but this optimizer has several; take "
            "optimizer=adamw, and what it finds there as optimizer.adam_lr of muon."
        )
    module = ImageModule(model, factory)
    data = ImageDataModule(dataset, cfg.batch_size, cfg.seed)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            **_relevant(config["trainer"]),
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=sys.stderr.isatty(),
            num_sanity_val_steps=0,
            limit_val_batches=0,
            max_epochs=-1,
            max_steps=STEPS,
            default_root_dir=folder,
        )
        finder = Tuner(trainer).lr_find(
            module,
            datamodule=data,
            min_lr=LEAST,
            max_lr=MOST,
            num_training=STEPS,
            early_stop_threshold=None,
            update_attr=False,
        )
    suggested = None if finder is None else finder.suggestion()
    if finder is None or suggested is None:
        raise UserError("no learning rate stands out; try a larger batch_size.")
    found = list(zip(finder.results["lr"], finder.results["loss"], strict=False))
    return found[SKIPPED:], suggested


def _relevant(trainer: Mapping[str, Any]) -> dict[str, Any]:
    names = ("accelerator", "devices", "precision", "gradient_clip_val", "accumulate_grad_batches")
    return trainer_options({name: trainer[name] for name in names if name in trainer})


def _run(cfg: DictConfig) -> None:
    found, suggested = find(cfg)
    print("learning rate   bits/dim, smoothed")
    for rate, loss in found[:: max(1, len(found) // ROWS)]:
        print(f"{rate:13.2e}   {loss:.4f}")
    print(f"suggested: optimizer.lr={suggested:.2g} (where the loss falls fastest)")


_ENTRY = hydra_entry(
    "train",
    # Nothing is left on disk: no run folder, no log.
    rewrite=lambda typed: [
        *typed,
        "hydra.run.dir=.",
        "hydra.output_subdir=null",
        "hydra/job_logging=none",
    ],
)(_run)


def main() -> None:
    """Command-line entry."""
    if any(word in ("--help", "-h") for word in sys.argv[1:]):
        print(USAGE)
    else:
        _ENTRY()


if __name__ == "__main__":
    main()
