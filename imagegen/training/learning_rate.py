"""Look for a learning rate: `imagegen find-lr` with the options of `train.py`.

The range test of Smith (2017, section 3.3) trains for some steps while the rate grows
exponentially, and suggests the one at which the loss falls fastest. Nothing is kept. (Lightning's
finder takes the slope over the rate itself, which an exponential growth makes steepest at the
smallest rates, of losses smoothed over half of its steps, and gives all parameters one rate.)
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning import Callback, LightningModule, Trainer, seed_everything

from imagegen.core.build import build
from imagegen.core.errors import UserError
from imagegen.core.machine import TF32, prepare, training_precision
from imagegen.core.values import plain
from imagegen.data.base import ImageDataset
from imagegen.data.datamodule import ImageDataModule
from imagegen.model.transformer import ImageTransformer
from imagegen.training.lightning_fixes import quiet_lightning
from imagegen.training.model_options import model_options
from imagegen.training.module import ImageModule
from imagegen.training.optimizers import optimizer_factory

STEPS = 100
LEAST, MOST = 1e-5, 0.3
# Steps, a fifth of a factor of ten: what differs between batches is much less beside it.
SMOOTHED = 4
# Too few losses precede these to smooth them.
SKIPPED = 10


@dataclass(frozen=True)
class Growing:
    """A schedule from `least` to `most` times the learning rate, exponentially."""

    least: float
    most: float

    def factor(self, progress: float) -> float:
        """The factor on the learning rate when `progress` of the steps, 0 to 1, is done."""
        return self.least * (self.most / self.least) ** progress


def steepest(
    rates: Sequence[float], losses: Sequence[float]
) -> tuple[list[tuple[float, float]], float | None]:
    """The losses smoothed over neighbouring steps, and the rate where they fall fastest.

    The slope is that over the logarithm of the rate. Smoothing looks both ways, so that nothing is
    moved towards larger rates.

    Args:
        rates: growing.
        losses: of the steps, before the weights moved at the rate.

    Returns:
        (rate, smoothed loss) but for the first and last steps, and the rate; None where the loss
        does not fall.
    """
    steps = np.arange(len(losses))
    weights = np.exp(-0.5 * ((steps[:, None] - steps) / SMOOTHED) ** 2)
    smooth = weights @ np.asarray(losses) / weights.sum(axis=1)
    # At both ends smoothing looks one way only.
    kept = slice(SKIPPED, max(SKIPPED, len(losses) - SMOOTHED))
    if len(steps[kept]) < 2:
        return [], None
    slopes = np.gradient(smooth[kept], np.log(rates)[kept])
    found = list(zip(np.asarray(rates)[kept].tolist(), smooth[kept].tolist(), strict=True))
    best = int(slopes.argmin())
    return found, found[best][0] if slopes[best] < 0 else None


class _Record(Callback):
    """Keeps the rate and the loss of each step, until one is nan or infinite."""

    def __init__(self) -> None:
        self.rates: dict[int, float] = {}
        self.losses: dict[int, float] = defaultdict(float)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.step = trainer.global_step
        self.rates[self.step] = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning divides it by the number of batches that a step takes.
        self.losses[self.step] += float(outputs["loss"])
        if not math.isfinite(self.losses[self.step]):
            del self.losses[self.step]
            trainer.should_stop = True


def find(cfg: DictConfig) -> tuple[list[tuple[float, float]], dict[str, float]]:
    """(learning rate, smoothed loss) of the steps, and the rates suggested by their names.

    Args:
        cfg: a composed `conf/train.yaml`.

    Raises:
        UserError: if the model cannot be trained, or no rate is clearly the best.
    """
    quiet_lightning()
    names = ("dataset", "model", "attention", "head", "trainer")
    config = plain(OmegaConf.create({name: cfg[name] for name in names}))
    seed_everything(cfg.seed, workers=True, verbose=False)
    dataset = build(config["dataset"], ImageDataset)
    model = ImageTransformer.from_options(dataset.spec, **model_options(config, dataset))
    factory = optimizer_factory(cfg, model)
    own = {name: cfg.optimizer[name] for name in cfg.optimizer if name.split("_")[-1] == "lr"}
    if not 1e-12 < own.get("lr", 0) < 1e12:
        raise UserError(
            f"optimizer.lr={own.get('lr')} must be a number above 0: the rates of an optimizer "
            "grow in their ratio to it."
        )
    module = ImageModule(model, factory, Growing(LEAST / own["lr"], MOST / own["lr"]))
    data = ImageDataModule(dataset, cfg.batch_size, cfg.seed)
    record = _Record()
    _train(module, data, record, config["trainer"])
    rates = [record.rates[step] for step in record.losses]
    found, best = steepest(rates, list(record.losses.values()))
    if best is None:
        raise UserError("no learning rate is clearly the best; try a larger batch_size.")
    return found, {name: rate * best / own["lr"] for name, rate in own.items()}


def _train(
    module: ImageModule, data: ImageDataModule, record: _Record, options: Mapping[str, Any]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            **_relevant(options),
            logger=False,
            callbacks=[record],
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=sys.stderr.isatty(),
            num_sanity_val_steps=0,
            limit_val_batches=0,
            max_epochs=-1,
            max_steps=STEPS,
            default_root_dir=folder,
        )
        trainer.fit(module, datamodule=data)


def _relevant(trainer: Mapping[str, Any]) -> dict[str, Any]:
    names = ("accelerator", "devices", "precision", "gradient_clip_val", "accumulate_grad_batches")
    options, precision = training_precision({n: trainer[n] for n in names if n in trainer})
    prepare(tf32=precision.value == TF32)
    return options
