"""What a checkpoint says about the images it was trained on, compared with those of today.

A checkpoint keeps under `data`:

    splits      for train, val and test: `images` (how many), `digest` (of the set of images) and
                `labels` (of the set of images with the names of their classes, None without)
    trained_on  int64 "n", sorted: `image_digests` of all images that were ever in its train split
    complete    false if an earlier version, which kept none of this, began the training

Eight bytes a training image are less than a single parameter takes with its optimizer's state
(twelve), and unlike a Bloom filter they answer exactly. Images are compared by their levels, as the
model sees them, so a copy is recognised whatever its file's name, format and folder.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64

from imagegen.core.build import build
from imagegen.core.errors import UserError
from imagegen.core.processes import is_first_process
from imagegen.core.spec import ImageSpec
from imagegen.core.words import counted
from imagegen.data.base import SPLIT_NAMES, ImageDataset, ImageSplit
from imagegen.data.image_folder import POSITION, ImageFolder

KEY = "data"
_PLACES = ("root", "cache")


def build_dataset(
    config: dict[str, Any], resume: str | None, overrides: Sequence[str] = ()
) -> ImageDataset:
    """The data set of a run; of one that is continued, split and numbered as it was.

    Args:
        config: its options with their `_target_`. A split that the checkpoint does not name is that
            of earlier versions, and is entered here unless `overrides` say otherwise.
        resume: the checkpoint that the run continues, or None.
        overrides: what the user has typed.

    Raises:
        UserError: for options that cannot be; and where the data are split by another rule than
            those of the checkpoint, or have a class that its model does not know.
    """
    if resume is None:
        return build(config, ImageDataset)
    from imagegen.checkpoint.reading import read_metadata

    metadata = read_metadata(resume)
    split_by = _split_by(metadata)
    if split_by is not None and split_by != config.get("split_by", split_by):
        if any(text.lstrip("+").startswith("dataset.split_by=") for text in overrides):
            raise UserError(
                f"dataset.split_by={config['split_by']} would move images that {resume} was "
                f"trained on into other splits; leave it {split_by}, or start a new run."
            )
        config["split_by"] = split_by
    dataset = build(config, ImageDataset)
    if metadata["model"].get("n_classes") is None:
        return dataset
    return Relabelled(dataset, class_numbers(metadata, dataset), known_classes(metadata))


def dataset_of(
    metadata: Mapping[str, Any], overrides: Mapping[str, Any] | None, spec: ImageSpec
) -> ImageDataset:
    """The data set that a checkpoint was trained on, prepared.

    Args:
        metadata: of the checkpoint; its entry `dataset` is a `_target_` config.
        overrides: options to replace, such as `root` on another machine; None leaves one as it is.
        spec: what the model draws.

    Raises:
        UserError: where the data set does not take an option, is not found, or holds other images.
    """
    if not isinstance(metadata["dataset"], Mapping):
        raise UserError("the checkpoint is damaged: its data set is not a set of options.")
    config = dict(metadata["dataset"])
    config.update({key: value for key, value in (overrides or {}).items() if value is not None})
    dataset: ImageDataset = build(config, ImageDataset)
    if dataset.spec != spec:
        raise UserError(
            f"data set {dataset.name} holds images of {words(dataset.spec)}, but the "
            f"checkpoint's model takes {words(spec)}."
        )
    dataset.prepare()
    return dataset


def words(spec: ImageSpec) -> str:
    """A spec in words, such as "28x28 pixels, 1 channel, 256 levels"."""
    channels = counted(spec.channels, "channel")
    return f"{spec.height}x{spec.width} pixels, {channels}, {spec.levels} levels"


def remember(dataset: ImageDataset, resume: str | None) -> dict[str, Any]:
    """What the checkpoints of a run keep under `data`; prints what is noteworthy about it.

    Args:
        dataset: prepared.
        resume: the checkpoint that the run continues, or None.

    Raises:
        UserError: where the data cannot be read, or what `resume` says of its own is damaged.
    """
    from imagegen.checkpoint.reading import read_metadata

    digests = {name: dataset.digests(name) for name in SPLIT_NAMES}
    trained_on, complete = np.unique(digests["train"]), True
    remarks: list[str] = []
    splits = {name: _describe(dataset, name, digests[name]) for name in SPLIT_NAMES}
    if resume is not None:
        metadata = read_metadata(resume)
        kept = _kept(metadata)
        if kept is None:
            complete = False
            remarks += _unknown(metadata)
        else:
            complete = kept["complete"]
            labelled = metadata["model"].get("n_classes") is not None
            remarks += _differences(kept, splits, digests["train"], labelled)
            trained_on = np.union1d(kept["trained_on"], trained_on)
    for name in ("val", "test"):
        seen = int(np.isin(digests[name], trained_on).sum())
        if seen:
            total = splits[name]["images"]
            remarks.append(f"{seen:,} of {total:,} {name} images are among those trained on")
    _say(remarks)
    return {"splits": splits, "trained_on": torch.from_numpy(trained_on), "complete": complete}


def count_trained_on(
    metadata: Mapping[str, Any], dataset: ImageDataset, which: str, n: int
) -> int | None:
    """How many of the first `n` images of a split a checkpoint was trained on; None if unknown.

    Prints what is noteworthy about it.

    Raises:
        UserError: where the data cannot be read, or what the checkpoint says of them is damaged.
    """
    kept = _kept(metadata)
    if kept is None:
        _say(_unknown(metadata))
        return None
    digests = dataset.digests(which)
    n = len(digests[:n])
    seen = int(np.isin(digests[:n], kept["trained_on"]).sum())
    splits = {which: _describe(dataset, which, digests)}
    train = digests if which == "train" else None
    labelled = metadata["model"].get("n_classes") is not None
    remarks = _differences(kept, splits, train, labelled)
    if seen and which != "train":
        least = "" if kept["complete"] else "at least "
        remarks.append(
            f"the checkpoint was trained on {least}{seen:,} of these {n:,} {which} images, so the "
            "result says little about new ones"
        )
    _say(remarks)
    return seen


def known_classes(metadata: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The names of the classes that a checkpoint's model knows; None where it does not say.

    Raises:
        UserError: if that is not a list of one name per class.
    """
    names, count = metadata.get("class_names"), metadata["model"].get("n_classes")
    if names is None or count is None:
        return None
    if (
        not isinstance(names, list)
        or not all(isinstance(name, str) for name in names)
        or len(names) != count
    ):
        raise UserError(f"the checkpoint is damaged: it has no names for its {count} classes.")
    return tuple(names)


def class_numbers(
    metadata: Mapping[str, Any], dataset: ImageDataset
) -> Int64[np.ndarray, " classes"]:
    """The numbers that a checkpoint's model gives to the classes of a data set, by their names.

    Args:
        metadata: of the checkpoint of a model that knows classes.
        dataset: with classes.

    Raises:
        UserError: where there are none, or the model does not know one of them.
    """
    known, names = known_classes(metadata), dataset.class_names
    if names is None:
        raise UserError(
            f"data set {dataset.name} has no labels, but the checkpoint's model was trained with "
            "them; give a folder with a sub-folder for each class."
        )
    if known is None:
        count = metadata["model"]["n_classes"]
        if len(names) != count:
            raise UserError(
                f"the number of classes is {len(names)} in data set {dataset.name} and {count} in "
                "the checkpoint, which does not name them; give data with the classes it was "
                "trained on."
            )
        return np.arange(count)
    unknown = [name for name in names if name not in known]
    if unknown:
        several = "es" if len(unknown) > 1 else ""
        raise UserError(
            f"the model does not know the class{several} {_listed(unknown)} of data set "
            f"{dataset.name}; it knows {_listed(known)}; rename or remove the folder{several[1:]}."
        )
    return np.array([known.index(name) for name in names], dtype=np.int64)


class Relabelled(ImageDataset):
    """A data set whose labels count the classes of a checkpoint.

    Args:
        dataset: the data set itself.
        numbers: the checkpoint's number of each of its classes.
        class_names: those of the checkpoint; None keeps those of the data set.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        numbers: Int64[np.ndarray, " classes"],
        class_names: tuple[str, ...] | None,
    ) -> None:
        self.name, self.spec = dataset.name, dataset.spec
        self.dataset = dataset
        self.numbers = numbers
        self._class_names = class_names or dataset.class_names

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Those of the checkpoint."""
        return self._class_names

    @property
    def left_out(self) -> Mapping[str, int]:
        """As of the data set itself."""
        return self.dataset.left_out

    def prepare(self) -> None:
        """As of the data set itself."""
        self.dataset.prepare()

    def split(self, which: str) -> ImageSplit:
        """The images of the data set itself under the checkpoint's numbers."""
        split = self.dataset.split(which)
        assert split.labels is not None  # class_numbers has refused a data set without
        return ImageSplit(split.images, self.numbers[split.labels])

    def sources(self, which: str) -> list[str]:
        """As of the data set itself."""
        return self.dataset.sources(which)

    def digests(self, which: str) -> Int64[np.ndarray, " n"]:
        """As of the data set itself."""
        return self.dataset.digests(which)


def resume_overrides(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Options, by name, that let a resumed run find the data of its checkpoint from anywhere.

    A relative folder was relative to the working directory of that time: what the checkpoint keeps
    as absolute takes its place.
    """
    dataset, config = metadata.get("dataset"), metadata.get("config")
    if not isinstance(dataset, Mapping):
        return {}
    typed = config.get("dataset") if isinstance(config, Mapping) else None
    found = {}
    for name in _PLACES:
        folder = typed.get(name) if isinstance(typed, Mapping) else None
        relative = isinstance(folder, str) and not Path(folder).expanduser().is_absolute()
        if relative and isinstance(dataset.get(name), str):
            found[f"dataset.{name}"] = dataset[name]
    return found


def _split_by(metadata: Mapping[str, Any]) -> str | None:
    """What decides the split of a checkpoint's image folder; None for other data sets."""
    dataset = metadata["dataset"]
    ours = f"{ImageFolder.__module__}.{ImageFolder.__name__}"
    if not isinstance(dataset, Mapping) or dataset.get("_target_") != ours:
        return None
    return str(dataset.get("split_by", POSITION))


def _describe(
    dataset: ImageDataset, which: str, digests: Int64[np.ndarray, " n"]
) -> dict[str, Any]:
    labels, names = dataset.split(which).labels, dataset.class_names
    labelled = None
    if labels is not None and names is not None:
        # By name: a folder more would change the numbers of the others.
        codes = np.array([int(_short(name.encode()), 16) for name in names], dtype=np.uint64)
        pairs = np.stack([digests.view(np.uint64), codes[labels]])
        labelled = _short(pairs[:, np.lexsort(pairs)].astype("<u8").tobytes())
    digest = _short(np.sort(digests).astype("<i8").tobytes())
    return {"images": len(digests), "digest": digest, "labels": labelled}


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _differences(
    kept: Mapping[str, Any],
    splits: Mapping[str, Mapping[str, Any]],
    train: Int64[np.ndarray, " n"] | None,
    labelled: bool,
) -> list[str]:
    """Sentences on how the splits differ from those that a checkpoint keeps.

    Args:
        kept: what it keeps.
        splits: the splits of today, as `_describe` gives them.
        train: digests of the train split, if that is among them.
        labelled: whether labels matter.
    """
    found = []
    for name, now in splits.items():
        then = kept["splits"][name]
        if now["digest"] != then["digest"]:
            count = "as many" if now["images"] == then["images"] else f"{then['images']:,}"
            text = f"{name} has {now['images']:,} images ({count} then)"
            if name == "train" and train is not None:
                new = int((~np.isin(train, kept["trained_on"])).sum())
                text += f", {new:,} of them new"
            found.append(text)
        elif labelled and now["labels"] != then["labels"]:
            found.append(f"{name} has the same images with other labels")
    return [f"the data differ from those of the checkpoint: {'; '.join(found)}"] if found else []


def _unknown(metadata: Mapping[str, Any]) -> list[str]:
    """What is said of a checkpoint of before, whose split may have moved since."""
    if _split_by(metadata) != POSITION:
        return []
    return [
        "the checkpoint, of an earlier version, does not say which images it was trained on, and "
        "its folder is split by position: if a file has been added or removed since, test images "
        "are among them"
    ]


def _say(remarks: Sequence[str]) -> None:
    if is_first_process():
        for remark in remarks:
            print(f"note: {remark}", file=sys.stderr)


def _kept(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a checkpoint keeps about its data, with `trained_on` as an array; None for nothing."""
    if metadata.get(KEY) is None:
        return None
    damaged = UserError("the checkpoint is damaged: what it says of its data cannot be read.")
    try:
        kept = dict(metadata[KEY])
        trained_on = kept["trained_on"]
        for name in SPLIT_NAMES:
            split = kept["splits"][name]
            if not isinstance(split["images"], int) or not {"digest", "labels"} <= set(split):
                raise damaged
    except (TypeError, LookupError, ValueError) as error:
        raise damaged from error
    if (
        not isinstance(trained_on, torch.Tensor)
        or trained_on.dtype != torch.int64
        or trained_on.ndim != 1
        or not trained_on.is_contiguous()  # one element could represent any number
        or not isinstance(kept.get("complete"), bool)
    ):
        raise damaged
    return {**kept, "trained_on": trained_on.numpy()}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
