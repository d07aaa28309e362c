"""Write results whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from imagegen.core.errors import UserError

_PARTIAL = ".partial"


@contextlib.contextmanager
def staged_folder(target: Path, owned: Iterable[str]) -> Iterator[Path]:
    """A fresh folder to write into, whose content takes its place in `target` at the end.

    A target that does not exist appears at once, complete, by a rename. In one that does exist (it
    may be the working directory or a mount point) only the entries named in `owned` are replaced,
    each by a rename. On any exception the target and its parents are left as they were.

    The folder is made before the block runs, so that a place that cannot be written is refused
    before any work is done. It is next to the target or, where that exists, in it, and is named
    `.<name>.<random>.partial`: only a killed process leaves one behind, and it may be deleted.

    Args:
        target: the folder to write; missing parents are made.
        owned: names of files and folders that an earlier result may have left in the target.

    Raises:
        UserError: if the target is not a folder or holds anything else than `owned`, or if it
            cannot be written.
    """
    owned = set(owned)
    # Through a symbolic link, the folder that it names is written.
    folder = Path(os.path.realpath(target))
    with _disk_errors(target):
        exists = _check_target(folder, target, owned)
    made = [] if exists else [parent for parent in folder.parents if not parent.exists()]
    staging = None
    try:
        with _disk_errors(target):
            folder.parent.mkdir(parents=True, exist_ok=True)
            staging = _beside(folder, folder if exists else folder.parent)
            staging.mkdir()
        with _disk_errors(target, staging):
            yield staging
            if exists:
                _swap(staging, folder, owned)
            else:
                staging.rename(folder)
        made = []
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()


@contextlib.contextmanager
def made_folder(target: Path) -> Iterator[Path]:
    """A folder to write into in place, made with its parents where it does not exist.

    On any exception the folders that were made are removed again, if they are empty.

    Raises:
        UserError: if the target is not a folder, or cannot be written.
    """
    folder = Path(os.path.realpath(target))
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with _disk_errors(target):
            folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except BaseException:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


def lock_folder(folder: Path, shared: bool = False) -> int | None:
    """Keep a folder for this process, or with `shared` for those that share it, until it ends.

    Returns:
        A descriptor; closing it gives the folder back. None where the system or the file system
        has no locks.

    Raises:
        BlockingIOError: if another process holds the folder.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    # The folder itself is locked, so that no file stays behind.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:  # Some network file systems
        os.close(descriptor)
        return None
    return descriptor


def remove_leftovers(*folders: Path) -> None:
    """Remove files that killed processes were writing into the folders."""
    for folder in folders:
        for leftover in folder.glob(f".*{_PARTIAL}"):
            if leftover.is_file():
                leftover.unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes | str, sync: bool = True) -> None:
    """Write a file whole: under a temporary name next to it, then renamed over it.

    Missing parents are made; text is UTF-8. Anything but a regular file (`/dev/stdout`) is written
    directly. Without `sync` it is quicker, and a power cut may leave a broken file.

    Raises:
        UserError: naming the path, if it cannot be written.
    """
    content = data.encode() if isinstance(data, str) else data
    real = Path(os.path.realpath(path))
    temporary = None
    try:
        with _disk_errors(path):
            if real.exists() and not real.is_file():
                with open(path, "wb") as file:
                    file.write(content)
                return
            real.parent.mkdir(parents=True, exist_ok=True)
            mode = real.stat().st_mode & 0o7777 if real.exists() else 0o666 & ~_umask()
            temporary = _beside(real, real.parent)
            with open(temporary, "xb", opener=_private) as file:
                file.write(content)
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            os.chmod(temporary, mode)
            os.replace(temporary, real)
            temporary = None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def ensure_writable(path: Path) -> None:
    """Refuse a file that could not be written later, before work is done. Leaves nothing behind.

    Raises:
        UserError: naming the path.
    """
    real = Path(os.path.realpath(path))
    with _disk_errors(path):
        if real.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if real.exists() and not real.is_file():
            return
        parent = next(parent for parent in real.parents if parent.exists())
        with tempfile.TemporaryFile(dir=parent):
            pass


@contextlib.contextmanager
def _disk_errors(target: Path, staging: Path | None = None) -> Iterator[None]:
    """Turn an OSError into a UserError that names the target.

    With `staging`, errors of a block that is not ours: only those that concern our folder, or a
    full or failing disk, are turned.
    """
    full = {errno.ENOSPC, errno.EROFS, errno.EFBIG, errno.EIO, getattr(errno, "EDQUOT", -1)}
    try:
        yield
    except OSError as error:
        if staging is not None:
            inside = error.filename is not None and str(staging) in os.fsdecode(error.filename)
            if not inside and (error.filename is not None or error.errno not in full):
                raise
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"cannot write {target}: {reason}.") from error


def _check_target(folder: Path, target: Path, owned: set[str]) -> bool:
    """Whether the folder exists, holding nothing that is not ours."""
    if not folder.exists():
        return False
    if not folder.is_dir():
        raise UserError(f"cannot write the folder {target}: a file of that name is in its place.")
    foreign = sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.name not in owned and not entry.name.endswith(_PARTIAL)
    )
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise UserError(
            f"the folder {target} holds other files ({foreign[0]}{more}); name a new or empty one."
        )
    return True


def _swap(staging: Path, folder: Path, owned: set[str]) -> None:
    """Put the new entries in the place of the owned ones, or leave all as it was."""
    new = sorted(entry.name for entry in staging.iterdir())
    old = [name for name in sorted(owned) if os.path.lexists(folder / name)]
    # Next to the staging folder, so that what cannot be put back is not deleted with it.
    attic = _beside(folder / "old", folder)
    moves = [(folder / name, attic / name) for name in old]
    moves += [(staging / name, folder / name) for name in new]
    done: list[tuple[Path, Path]] = []
    try:
        attic.mkdir()
        for source, destination in moves:
            source.rename(destination)
            done.append((source, destination))
    except BaseException:
        for source, destination in reversed(done):
            with contextlib.suppress(OSError):
                destination.rename(source)
        with contextlib.suppress(OSError):
            attic.rmdir()
        raise
    shutil.rmtree(attic, ignore_errors=True)


def _beside(path: Path, folder: Path) -> Path:
    """A name in `folder`, which nothing has, for what is to become `path`.

    Known before anything of that name is made, so that an interrupt cannot leave it behind.
    """
    return folder / f".{path.name}.{secrets.token_hex(8)}{_PARTIAL}"


def _private(path: str, flags: int) -> int:
    """Open a file that others may not read: it may replace one that they may not."""
    return os.open(path, flags, 0o600)


def _umask() -> int:
    # Python offers no way to read it without setting it.
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex, read in pieces.

    Raises:
        UserError: where the file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    return digest.hexdigest()
