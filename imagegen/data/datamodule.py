"""Feed a data set to Lightning."""

from __future__ import annotations

import warnings
from typing import Any

from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader

from imagegen.core.errors import UserError
from imagegen.core.values import whole_number
from imagegen.data.base import ImageDataset, ImageSplit
from imagegen.data.loading import (
    Batch,
    BatchDataset,
    EvaluationShard,
    TrainLoader,
    TrainOrder,
    ready,
)

MOST = 2**63 - 1


class ImageDataModule(LightningDataModule):
    """Loaders of the three splits; batches as `imagegen.data.loading.BatchDataset` says.

    Training images come in an order that depends on `seed` and the epoch only, and a run resumed in
    the middle of an epoch sees exactly the batches that it would have seen. An incomplete last
    batch is left out of training unless it is the only one. Evaluation covers each image once,
    in order, also when several processes share the work.

    Args:
        dataset: where the images come from.
        batch_size: training images per step and a process.
        seed: of the training order.
        eval_batch_size: images a validation or test step; None is `batch_size`.

    Raises:
        UserError: for sizes below one or a negative seed.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        batch_size: int,
        seed: int = 0,
        eval_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        self.dataset = dataset
        self.batch_size = whole_number(batch_size, "batch_size", 1, MOST)
        self.seed = whole_number(seed, "seed", 0, MOST)
        self.eval_batch_size = self.batch_size
        if eval_batch_size is not None:
            self.eval_batch_size = whole_number(eval_batch_size, "eval_batch_size", 1, MOST)
        self._splits: dict[str, ImageSplit] = {}

    def prepare_data(self) -> None:
        """Download or convert, in one process a machine."""
        self.dataset.prepare()

    def split(self, which: str) -> ImageSplit:
        """The whole split, as the loaders read it."""
        if which not in self._splits:
            self._splits[which] = self.dataset.split(which)
        return self._splits[which]

    def train_dataloader(self) -> DataLoader[Batch]:
        """Shuffled, resumable."""
        _silence_worker_advice()
        data = BatchDataset(self.split("train"))
        replicas, rank = self._processes()
        order = TrainOrder(
            len(data), self.batch_size, self.seed, replicas, rank, self._batches_done
        )
        return TrainLoader(
            data,
            batch_size=self.batch_size,
            sampler=order,
            drop_last=order.drop_last_batch,
            collate_fn=ready,
            pin_memory=self._on_cuda(),
        )

    def val_dataloader(self) -> DataLoader[Batch]:
        """In order, each image once."""
        return self._evaluation("val")

    def test_dataloader(self) -> DataLoader[Batch]:
        """In order, each image once."""
        return self._evaluation("test")

    def _evaluation(self, which: str) -> DataLoader[Batch]:
        _silence_worker_advice()
        data = BatchDataset(self.split(which))
        replicas, rank = self._processes()
        options: dict[str, Any] = {"collate_fn": ready, "pin_memory": self._on_cuda()}
        if replicas == 1:
            return DataLoader(data, batch_size=self.eval_batch_size, **options)
        if len(data) < replicas:
            raise UserError(
                f"the {which} split has {len(data)} images, fewer than the {replicas} processes; "
                "use fewer devices."
            )
        shard = EvaluationShard(len(data), self.eval_batch_size, replicas, rank)
        # batch_size None: the sampler yields whole batches.
        return DataLoader(data, batch_size=None, sampler=shard, **options)

    def _processes(self) -> tuple[int, int]:
        """(number of processes, number of this one)."""
        if self.trainer is None:
            return 1, 0
        return self.trainer.world_size, self.trainer.global_rank

    def _on_cuda(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"

    def _batches_done(self) -> int:
        return 0 if self.trainer is None else self.trainer.fit_loop.batch_idx + 1


def _silence_worker_advice() -> None:
    """Lightning advises worker processes for every loader without; indexing an array needs none."""
    warnings.filterwarnings("ignore", message=r"The '\w+_dataloader' does not have many workers")
