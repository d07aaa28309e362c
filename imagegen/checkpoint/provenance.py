"""Where a result comes from: the checkpoint's SHA-256, the versions and the commit."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from imagegen.core.errors import UserError
from imagegen.core.files import sha256_of
from imagegen.core.installation import PACKAGE

if TYPE_CHECKING:
    import torch

    from imagegen.checkpoint.reading import LoadedCheckpoint


@dataclass(frozen=True)
class Source:
    """A loaded checkpoint and the SHA-256 (hex) of the file it was read from."""

    loaded: LoadedCheckpoint
    sha256: str

    def to_dict(self) -> dict[str, Any]:
        """The entries that every result keeps about its checkpoint."""
        return {"checkpoint": str(self.loaded.path.absolute()), "checkpoint_sha256": self.sha256}


def load_source(ckpt: str, device: torch.device) -> Source:
    """Load a checkpoint (a file or a run folder) together with its SHA-256.

    Raises:
        UserError: where it is missing, truncated or foreign, or is replaced while being read, as
        a running training does with its last checkpoint.
    """
    from imagegen.checkpoint.reading import load_checkpoint, resolve_checkpoint

    path = resolve_checkpoint(ckpt)
    before = path.stat()
    sha256 = sha256_of(path)
    loaded = load_checkpoint(path, device)
    after = path.stat()
    if (before.st_ino, before.st_mtime_ns) != (after.st_ino, after.st_mtime_ns):
        raise UserError(f"{path} was replaced while it was being read; run the command again.")
    return Source(loaded, sha256)


def versions() -> dict[str, str]:
    """Versions of imagegen and PyTorch."""
    import torch

    import imagegen

    return {"imagegen_version": imagegen.__version__, "torch_version": str(torch.__version__)}


def commit() -> str | None:
    """Commit of the clone that runs, with "-dirty" where files differ; None outside a clone."""
    root = PACKAGE.parent
    # Git would search the folders above, where another repository may hold the environment.
    if not (root / ".git").exists():
        return None
    asked = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run([*asked, "--abbrev=40"], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None
