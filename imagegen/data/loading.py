"""Batches from an array of images, in an order that survives an interruption.

A batch is one indexing of the whole array, which takes microseconds per image, so there are no
worker processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from imagegen.core.errors import UserError
from imagegen.data.base import ImageSplit

Batch: TypeAlias = dict[str, Tensor]


class BatchDataset(Dataset[Batch]):
    """A split whose items are whole batches.

    A batch holds `images` (uint8 "b h w c", levels), `indices` (int64 "b", positions in the split)
    and, where the split has labels, `labels` (int64 "b").
    """

    def __init__(self, split: ImageSplit) -> None:
        self.data = split

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, indices: Sequence[int] | Int64[np.ndarray, " b"]) -> Batch:
        """The batch of these images."""
        rows = np.asarray(indices, dtype=np.int64)
        batch = {
            "images": torch.from_numpy(np.asarray(self.data.images[rows])),
            "indices": torch.from_numpy(rows),
        }
        if self.data.labels is not None:
            batch["labels"] = torch.from_numpy(self.data.labels[rows])
        return batch

    def __getitem__(self, index: int | Sequence[int] | Int64[np.ndarray, " b"]) -> Batch:
        """The batch of one image, or of several."""
        return self.__getitems__([index] if isinstance(index, int) else index)


def ready(batch: Any) -> Batch:
    """Collate a batch that is ready already."""
    return cast(Batch, batch)


class TrainOrder(DistributedSampler[int]):
    """The order of the training images: a pure function of seed and epoch, resumable.

    Lightning resumes its own counters only, and its epoch number runs ahead of the data after a
    run that `max_steps` stopped. So this class keeps the number of the pass through the data as
    its state, and after a restart leaves out the batches that Lightning counts as trained on.
    (torchdata's `StatefulDataLoader` counts the batches that were fetched, and restores the state
    of a random sampler, whatever seed, batch size or number of processes the run has now.)

    Args:
        images: how many there are.
        batch_size: images a batch and a process.
        seed: the run's.
        replicas, rank: processes that share the images, and which of them this is.
        batches_done: batches of the present epoch that have been trained on; asked once after a
            restart, when the first batch is fetched.
    """

    def __init__(
        self,
        images: int,
        batch_size: int,
        seed: int,
        replicas: int = 1,
        rank: int = 0,
        batches_done: Callable[[], int] = lambda: 0,
    ) -> None:
        # Spread out: DistributedSampler adds the epoch, so seeds 0 and 1 would share their orders.
        spread = int(np.random.SeedSequence(seed).generate_state(1)[0])
        super().__init__(
            cast("Dataset[int]", range(images)),
            num_replicas=replicas,
            rank=rank,
            shuffle=True,
            seed=spread,
            drop_last=images >= replicas,
        )
        self.batch_size = batch_size
        self.batches_done = batches_done
        self.drop_last_batch = self.num_samples > batch_size
        self._identity = {
            "images": images,
            "batch_size": batch_size,
            "replicas": replicas,
            "seed": seed,
        }
        self._trainer_epoch = 0
        self._ahead = 0  # pass through the data minus the trainer's epoch
        self._restored: dict[str, int] | None = None
        self._restored_epoch: int | None = None

    @property
    def batches(self) -> int:
        """Batches of one epoch in this process."""
        whole, rest = divmod(self.num_samples, self.batch_size)
        return whole if self.drop_last_batch or rest == 0 else whole + 1

    def set_epoch(self, epoch: int) -> None:
        """Take note of the trainer's epoch, before its first batch."""
        if self._restored is not None:
            if self._restored_epoch in (None, epoch):
                self._restored_epoch = epoch
                self._ahead = self._restored["epoch"] - epoch
            else:  # the restored epoch was complete: none of its batches was read
                self._restored = None
        self._trainer_epoch = epoch
        super().set_epoch(epoch + self._ahead)

    def __iter__(self) -> Iterator[int]:
        # A generator: the epoch and the trainer's counters are final when the first index is drawn.
        done = 0
        if self._restored is not None:
            restored, self._restored = self._restored, None
            done = self.batches_done()
            if done == 0:  # the restored epoch was complete, or nothing of it was
                self._ahead = restored["epoch"] - restored["trainer_epoch"]
                self.set_epoch(self._trainer_epoch)
            elif done >= restored["batches"]:
                return
            else:
                self._check_identity(restored)
        yield from islice(super().__iter__(), done * self.batch_size, None)

    def state_dict(self) -> dict[str, int]:
        """Plain numbers, as a checkpoint keeps them."""
        return {
            "epoch": self.epoch,
            "trainer_epoch": self._trainer_epoch,
            "batches": self.batches,
            **self._identity,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue the epoch in which `state` was saved."""
        self._restored = dict(state)
        self._restored_epoch = None

    def check_restored(self) -> None:
        """Refuse to continue a half-done epoch of another order, before the first batch is fetched.

        Raises:
            UserError: if images, batch size, processes or seed are others than in the checkpoint.
        """
        restored = self._restored
        if restored is not None and 0 < self.batches_done() < restored["batches"]:
            self._check_identity(restored)

    def _check_identity(self, restored: dict[str, int]) -> None:
        for name, value in self._identity.items():
            if restored[name] != value:
                words = {"images": "number of training images", "replicas": "number of processes"}
                raise UserError(
                    f"the checkpoint was saved in the middle of an epoch with "
                    f"{words.get(name, name)} {restored[name]}, but this run has {value}; resume "
                    "with the same, or from a checkpoint saved at the end of an epoch."
                )


class TrainLoader(DataLoader[Batch]):
    """A loader that Lightning saves and restores: all state is that of its `TrainOrder`."""

    def state_dict(self) -> dict[str, Any]:
        """The order's state; empty where Lightning has replaced the order (`overfit_batches`)."""
        return self.sampler.state_dict() if isinstance(self.sampler, TrainOrder) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        if isinstance(self.sampler, TrainOrder) and state:
            self.sampler.load_state_dict(state)


class EvaluationShard(DistributedSampler[Int64[np.ndarray, "b"]]):
    """One process's batches of an evaluation split, in which no image occurs twice.

    DistributedSampler itself repeats images to make all shares equal, which would skew bits/dim.
    Here shares differ by one image at most, and every process gets the same number of batches
    (collective operations inside a step must not wait for a process that has finished), as far as
    there are enough images for that.
    """

    def __init__(self, images: int, batch_size: int, replicas: int, rank: int) -> None:
        super().__init__(
            cast("Dataset[Any]", range(images)), num_replicas=replicas, rank=rank, shuffle=False
        )
        share = np.arange(rank, images, replicas, dtype=np.int64)
        count = -(-self.num_samples // batch_size)  # num_samples is the largest share
        self._batches = [batch for batch in np.array_split(share, count) if len(batch)]

    def __iter__(self) -> Iterator[Int64[np.ndarray, " b"]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)
