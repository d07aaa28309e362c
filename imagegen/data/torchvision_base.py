"""What the data sets read through torchvision share: their folders, downloads and splits."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import tarfile
import tempfile
import zlib
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int64, UInt8

from imagegen.core.errors import UserError
from imagegen.data.base import (
    ImageDataset,
    ImageSplit,
    check_split_name,
    data_folder,
    hold_out,
)

MAX_VAL_IMAGES = 5000
NETWORK_TIMEOUT_SECONDS = 60.0


class TorchvisionDataset(ImageDataset):
    """A data set in the folder layout of `torchvision.datasets`.

    The official test set is the test split; 5,000 of the official training images (never more
    than a tenth) are the validation split.

    Args:
        root: the folder that holds `folder`; None is the project's own data folder.
        download: fetch what is missing. Files that are there are never replaced, and nothing is
            fetched while all are there.
    """

    title: ClassVar[str]  # as people write it
    folder: ClassVar[str]  # below root
    files: ClassVar[tuple[str, ...]]  # below folder

    def __init__(self, root: str | Path | None = None, download: bool = True) -> None:
        self.root = data_folder() if root is None else Path.cwd() / Path(root).expanduser()
        if not isinstance(download, bool):
            raise UserError(f"dataset.download={download}, but it must be true or false.")
        self.download = download
        self._loaded: dict[str, ImageSplit] = {}

    def prepare(self) -> None:
        """Unpack archives that the user placed, or download, where files are missing.

        Raises:
            UserError: where files are missing with downloads off, or a download fails.
        """
        if not self._missing():
            return
        with _sentences(f"{self.title} cannot be unpacked in {self.root}"):
            self._unpack()
        if not self._missing():
            return
        if not self.download:
            raise self._not_found()
        with _sentences(
            f"{self.title} could not be downloaded to {self.root}",
            "check the network and the folder, or place the files there as data/README.md says",
        ):
            self._fetch()

    def split(self, which: str) -> ImageSplit:
        """One split, read once and then kept."""
        check_split_name(which)
        if which not in self._loaded:
            if self._missing():
                raise self._not_found()
            images, labels = self._checked(official_train=which != "test")
            if which == "test":
                self._loaded["test"] = ImageSplit(images, labels)
            else:
                stays, cut = hold_out(len(images), min(MAX_VAL_IMAGES, len(images) // 10))
                order = np.concatenate([cut, stays])  # both splits are views of one array
                images, labels = images[order], labels[order]
                self._loaded["val"] = ImageSplit(images[: len(cut)], labels[: len(cut)])
                self._loaded["train"] = ImageSplit(images[len(cut) :], labels[len(cut) :])
        return self._loaded[which]

    @abstractmethod
    def _torchvision_class(self) -> Any:
        """The class of `torchvision.datasets` that knows the files."""

    @abstractmethod
    def _read(
        self, official_train: bool
    ) -> tuple[UInt8[np.ndarray, "n h w c"], Int64[np.ndarray, " n"]]:
        """Images and labels of torchvision's training or test set."""

    def _unpack(self) -> None:
        """Make missing files from archives beside them."""
        return None

    def _missing(self) -> list[Path]:
        wanted = [self.root / self.folder / name for name in self.files]
        return [path for path in wanted if not path.is_file()]

    def _not_found(self) -> UserError:
        return UserError(
            f"{self.title} was not found: {self._missing()[0]} is missing; set dataset.root to the "
            f"folder that holds {self.folder}, or dataset.download=true."
        )

    def _checked(
        self, official_train: bool
    ) -> tuple[UInt8[np.ndarray, "n h w c"], Int64[np.ndarray, " n"]]:
        images, labels = self._read(official_train)
        least = 10 if official_train else 1  # a tenth is at least one validation image
        if images.shape[1:] != self.spec.shape or len(images) < least or len(images) != len(labels):
            raise UserError(
                f"{self.root / self.folder} does not hold {self.title}: it has images of shape "
                f"{images.shape} and {len(labels)} labels; replace the files."
            )
        classes = len(self.class_names or ())
        if labels.min() < 0 or labels.max() >= classes:
            raise UserError(
                f"{self.root / self.folder} does not hold {self.title}: its labels reach from "
                f"{labels.min()} to {labels.max()}, but there are {classes} classes; replace the "
                "files."
            )
        return images, labels

    def _fetch(self, archive: Path | None = None) -> None:
        """Let torchvision download (or unpack `archive`) aside, then move the files into place."""
        new = [path for path in (self.root, *self.root.parents) if not path.exists()]
        self.root.mkdir(parents=True, exist_ok=True)
        try:
            self._fetch_into(archive)
        finally:
            # A mistyped root leaves no folder behind.
            with suppress(OSError):
                for path in new:
                    path.rmdir()

    def _fetch_into(self, archive: Path | None) -> None:
        with tempfile.TemporaryDirectory(prefix=".download-", dir=self.root) as aside:
            if archive is not None:
                (Path(aside) / archive.name).symlink_to(archive)
            with _network_timeout():
                self._torchvision_class()(aside, download=True)
            target = self.root / self.folder
            target.mkdir(parents=True, exist_ok=True)
            for path in self._missing():
                os.replace(Path(aside) / self.folder / path.name, path)


def unpack_gzip(archive: Path, target: Path) -> None:
    """Decompress `archive` to `target`, which appears only when it is whole.

    Raises:
        OSError, EOFError: where the archive is broken or the folder cannot be written.
    """
    import gzip

    with tempfile.NamedTemporaryFile(
        prefix=f".{target.name}-", dir=target.parent, delete=False
    ) as part:
        try:
            with gzip.open(archive) as source:
                shutil.copyfileobj(source, part)
            part.flush()
            os.fsync(part.fileno())
            part.close()
            os.chmod(part.name, 0o644)  # temporary files are private; data are not
            os.replace(part.name, target)
        except BaseException:
            Path(part.name).unlink(missing_ok=True)
            raise


@contextmanager
def _sentences(what: str, advice: str = "check or replace the files there") -> Iterator[None]:
    try:
        yield
    # What a network, a mirror or an archive can get wrong.
    except (
        RuntimeError,
        OSError,
        EOFError,
        http.client.HTTPException,
        tarfile.TarError,
        zlib.error,
    ) as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise UserError(f"{what} ({reason}); {advice}.") from error


@contextmanager
def _network_timeout() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(NETWORK_TIMEOUT_SECONDS)  # torchvision would wait without a limit
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
