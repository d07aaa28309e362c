"""A run that is interrupted and resumed sees the batches that an uninterrupted one sees."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint

from imagegen.core.errors import UserError
from imagegen.data.datamodule import ImageDataModule
from tests.data.helpers import Numbered

BATCHES = 5  # 23 images in batches of 4
# The saving callback itself need not be there again.
pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


class Recorder(LightningModule):
    """Notes the images of each training batch; validation counts its images."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[int, ...]] = []
        self.validated = 0
        self.fail_at: int | None = None

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.fail_at == len(self.seen):
            raise KeyError("stopped")
        self.seen.append(tuple(batch["indices"].tolist()))
        return self.weight * batch["images"].float().mean()

    def validation_step(self, batch: dict[str, torch.Tensor]) -> None:
        self.validated += len(batch["indices"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(
    folder: Path,
    ckpt: Path | None = None,
    callbacks: list[Callback] | None = None,
    fail_at: int | None = None,
    batch_size: int = 4,
    seed: int = 3,
    **options: Any,
) -> tuple[Recorder, Trainer]:
    model = Recorder()
    model.fail_at = fail_at
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(callbacks),
        callbacks=callbacks,
        num_sanity_val_steps=0,
        **options,
    )
    data = ImageDataModule(Numbered(), batch_size=batch_size, seed=seed)
    trainer.fit(model, data, ckpt_path=ckpt, weights_only=True)
    return model, trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, ...]]:
    """Batches of three uninterrupted epochs."""
    seen = fit(tmp_path_factory.mktemp("whole"), max_epochs=3, limit_val_batches=0)[0].seen
    assert len(seen) == 3 * BATCHES
    assert len({frozenset(sum(seen[i : i + BATCHES], ())) for i in (0, 5, 10)}) == 3
    return seen


@pytest.mark.parametrize("validate", [0, 1.0])
@pytest.mark.parametrize("stop", [2, 5, 7, 10])
def test_stopped_by_max_steps(
    tmp_path: Path, whole: list[tuple[int, ...]], stop: int, validate: float
) -> None:
    first, trainer = fit(tmp_path, max_steps=stop, limit_val_batches=validate)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    second, _ = fit(tmp_path, tmp_path / "x.ckpt", max_steps=15, limit_val_batches=validate)
    assert first.seen + second.seen == whole


@pytest.mark.parametrize("validate", [0, 1.0])
@pytest.mark.parametrize("stop", [3, 5])
def test_stopped_by_max_steps_and_saved_by_the_callback(
    tmp_path: Path, whole: list[tuple[int, ...]], stop: int, validate: float
) -> None:
    saver = ModelCheckpoint(tmp_path, "x", save_on_train_epoch_end=True)
    first, _ = fit(tmp_path, callbacks=[saver], max_steps=stop, limit_val_batches=validate)
    second, trainer = fit(
        tmp_path, tmp_path / "x.ckpt", max_steps=stop + 4, limit_val_batches=validate
    )
    trainer.save_checkpoint(tmp_path / "y.ckpt")
    third, _ = fit(tmp_path, tmp_path / "y.ckpt", max_steps=15, limit_val_batches=validate)
    assert first.seen + second.seen + third.seen == whole


@pytest.mark.parametrize("interval", [2, 0.4, 1.0])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_saved_after_a_validation(
    tmp_path: Path, whole: list[tuple[int, ...]], interval: float, number: int
) -> None:
    saver = ModelCheckpoint(
        tmp_path, "{step}", save_top_k=-1, save_on_train_epoch_end=False, save_last=True
    )
    options = {"max_epochs": 3, "val_check_interval": interval}
    first, _ = fit(tmp_path, callbacks=[saver], **options)
    assert first.seen == whole
    steps = sorted(int(path.stem.split("=")[1]) for path in tmp_path.glob("step=*.ckpt"))
    step = steps[number]
    second, resumed = fit(tmp_path, tmp_path / f"step={step}.ckpt", **options)
    assert second.seen == whole[step:]
    assert (resumed.global_step, resumed.current_epoch) == (15, 3)
    assert second.validated == 9 * (len(steps) - number - 1)


@pytest.mark.parametrize("every", [3, 5])
@pytest.mark.parametrize("validate", [0, 1.0])
def test_saved_after_a_training_step(
    tmp_path: Path, whole: list[tuple[int, ...]], every: int, validate: float
) -> None:
    saver = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=every)
    fit(tmp_path, callbacks=[saver], max_epochs=3, limit_val_batches=validate)
    for step in range(every, 15, every):
        ckpt = tmp_path / f"step={step}.ckpt"
        model, _ = fit(tmp_path, ckpt, max_epochs=3, limit_val_batches=validate)
        assert model.seen == whole[step:]


@pytest.mark.parametrize("step", [0, 2, 5, 8])
def test_saved_when_a_step_failed(tmp_path: Path, whole: list[tuple[int, ...]], step: int) -> None:
    saver = ModelCheckpoint(tmp_path, "x", save_on_exception=True, save_top_k=0)
    with pytest.raises(KeyError):
        fit(tmp_path, callbacks=[saver], fail_at=step, max_epochs=3, limit_val_batches=0)
    if not (tmp_path / "x.ckpt").exists():
        assert step == 0  # there was nothing to save
        return
    model, _ = fit(tmp_path, tmp_path / "x.ckpt", max_epochs=3, limit_val_batches=0)
    assert model.seen == whole[step:]


def test_saved_at_the_end_and_prolonged(tmp_path: Path, whole: list[tuple[int, ...]]) -> None:
    first, trainer = fit(tmp_path, max_epochs=2, limit_val_batches=0)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    second, _ = fit(tmp_path, tmp_path / "x.ckpt", max_epochs=3, limit_val_batches=0)
    assert first.seen + second.seen == whole


def test_fewer_batches_an_epoch(tmp_path: Path, whole: list[tuple[int, ...]]) -> None:
    options = {"limit_train_batches": 3, "limit_val_batches": 0}
    _, trainer = fit(tmp_path, max_steps=4, **options)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    model, _ = fit(tmp_path, tmp_path / "x.ckpt", max_steps=9, **options)
    assert model.seen == [*whole[6:8], *whole[10:13]]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"seed": 4}, "seed 3, but this run has 4"), ({"batch_size": 2}, "batch_size 4")],
)
def test_another_order_in_the_middle_of_an_epoch_is_refused(
    tmp_path: Path, change: dict[str, int], message: str
) -> None:
    saver = ModelCheckpoint(tmp_path, "x", every_n_train_steps=3)
    fit(tmp_path, callbacks=[saver], max_steps=3, limit_val_batches=0)
    with pytest.raises(UserError, match=message):
        fit(tmp_path, tmp_path / "x.ckpt", max_epochs=2, limit_val_batches=0, **change)


def test_another_batch_size_after_a_whole_epoch(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "x", save_on_train_epoch_end=False)
    fit(tmp_path, callbacks=[saver], max_epochs=1)
    model, _ = fit(tmp_path, tmp_path / "x.ckpt", max_epochs=2, batch_size=2)
    assert [len(batch) for batch in model.seen] == [2] * 11


def test_overfitting_on_a_few_batches_works(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="turning off"):
        model, _ = fit(tmp_path, max_epochs=2, overfit_batches=2)
    assert model.seen == [(0, 1, 2, 3), (4, 5, 6, 7)] * 2
