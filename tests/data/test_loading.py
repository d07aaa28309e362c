import warnings

import pytest
import torch

from imagegen.core.errors import UserError
from imagegen.data.datamodule import ImageDataModule
from imagegen.data.loading import BatchDataset, EvaluationShard, TrainOrder
from tests.data.helpers import Numbered


def test_batches() -> None:
    batches = list(ImageDataModule(Numbered(), batch_size=4).val_dataloader())
    assert [len(batch["indices"]) for batch in batches] == [4, 4, 1]
    for batch in batches:
        assert set(batch) == {"images", "indices", "labels"}
        assert batch["images"].dtype == torch.uint8
        assert batch["images"].shape[1:] == (2, 3, 1)
        assert batch["indices"].dtype == batch["labels"].dtype == torch.int64
        assert torch.equal(batch["images"][:, 0, 0, 0].long(), batch["indices"])
    assert torch.cat([batch["indices"] for batch in batches]).tolist() == list(range(9))


def test_batches_without_labels() -> None:
    module = ImageDataModule(Numbered(labels=False), batch_size=4, eval_batch_size=3)
    assert [set(batch) for batch in module.test_dataloader()] == [{"images", "indices"}] * 2


def test_a_batch_is_a_copy() -> None:
    split = Numbered().split("train")
    split.images.setflags(write=False)  # as a memory map
    batch = BatchDataset(split)[3]
    batch["images"] += 1
    assert split.images[3, 0, 0, 0] == 3


def indices_of(loader: object) -> list[int]:
    return [index for batch in loader for index in batch["indices"].tolist()]


def test_training_order_is_a_function_of_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        loader = ImageDataModule(Numbered(), batch_size=4, seed=seed).train_dataloader()
        loader.sampler.set_epoch(epoch)
        return indices_of(loader)

    orders = {(seed, epoch): tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(set(orders.values())) == 9
    assert tuple(order(1, 2)) == orders[1, 2]
    for indices in orders.values():
        assert len(set(indices)) == len(indices) == 20  # an incomplete last batch is left out


@pytest.mark.parametrize(("images", "batches"), [(3, 1), (4, 1), (5, 1), (8, 2)])
def test_the_only_batch_is_kept(images: int, batches: int) -> None:
    loader = ImageDataModule(Numbered(train=images), batch_size=4).train_dataloader()
    assert len(loader) == len(list(loader)) == loader.sampler.batches == batches
    if images <= 4:
        assert sorted(indices_of(loader)) == list(range(images))


def test_processes_share_the_training_images() -> None:
    shares = [list(TrainOrder(23, 4, seed=0, replicas=3, rank=rank)) for rank in range(3)]
    assert [len(share) for share in shares] == [7, 7, 7]
    assert len(set().union(*shares)) == 21


@pytest.mark.parametrize("images", [7, 8, 9, 97])
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("batch_size", [2, 3, 32])
def test_processes_evaluate_each_image_once(images: int, replicas: int, batch_size: int) -> None:
    shards = [EvaluationShard(images, batch_size, replicas, rank) for rank in range(replicas)]
    seen = [index for shard in shards for batch in shard for index in batch.tolist()]
    assert sorted(seen) == list(range(images))
    assert len({len(shard) for shard in shards}) == 1
    assert all(1 <= len(batch) <= batch_size for shard in shards for batch in shard)


def test_state_is_plain_numbers() -> None:
    loader = ImageDataModule(Numbered(), batch_size=4).train_dataloader()
    state = loader.state_dict()
    assert state
    assert all(type(value) is int for value in state.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 1, "seed": -1}, "seed=-1"),
        ({"batch_size": 1, "eval_batch_size": 0}, "eval_batch_size=0"),
    ],
)
def test_bad_options(options: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ImageDataModule(Numbered(), **options)


def test_only_the_advice_about_workers_is_silenced() -> None:
    ImageDataModule(Numbered(), batch_size=4).train_dataloader()
    warnings.warn("The 'train_dataloader' does not have many workers which may", stacklevel=1)
    with pytest.raises(UserWarning, match="no workers"):
        warnings.warn("no workers", stacklevel=1)
