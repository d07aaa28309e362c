"""What all tests share: shape checks, no network, no settings of the machine's owner."""

from __future__ import annotations

import gc
import logging
import os
import pkgutil
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import jaxtyping
import pytest
from jaxtyping import install_import_hook
from packaging.version import Version

# Tensors in tests are small: threads would only get in each other's way. Read when torch is
# imported, and inherited by the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

# Checks every annotation of the package, shapes and dtypes included, whenever a function is called.
# It must come before the first import of the package. An int will do where a float is expected, as
# it does for static checkers.
CHECKED = ["imagegen"]
# Before this version, which needs Python 3.11, functions marked with `no_type_check` were checked
# too, and numba cannot compile them then.
if Version(jaxtyping.__version__) < Version("0.3.11"):
    package = Path(__file__).resolve().parent.parent / "imagegen"

    def inside(folder: Path, left_out: str) -> list[str]:
        place = ".".join(folder.relative_to(package.parent).parts)
        names = sorted(module.name for module in pkgutil.iter_modules([str(folder)]))
        return [f"{place}.{name}" for name in names if name != left_out]

    CHECKED = inside(package, "generation") + inside(package / "generation", "decode")
install_import_hook(CHECKED, "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")


class CheckedCalls(type(jaxtyping.config)):  # type: ignore[misc]
    """Checks the first calls of each function in each test: those after them are much like them.

    A test of hundreds of steps would else spend two thirds of its time on annotations.
    """

    checked = 10
    calls: ClassVar[Counter[object]] = Counter()
    off = False

    @property
    def jaxtyping_disable(self) -> bool:
        """Read by jaxtyping at each call of an annotated function, in a frame that names it."""
        # Of a function within a function, there is a new one at each call, but one code.
        code = getattr(sys._getframe(1).f_locals.get("fn"), "__code__", None)
        self.calls[code] += 1
        return self.off or self.calls[code] > self.checked

    @jaxtyping_disable.setter
    def jaxtyping_disable(self, off: bool) -> None:
        CheckedCalls.off = off


jaxtyping.config.__class__ = CheckedCalls

pytest.register_assert_rewrite("tests.attention.contract")

from tests.forks import Forks  # noqa: E402  (behind the hook above)


def pytest_collection_finish() -> None:
    """The collector of garbage passes over what has been imported, instead of reading it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _checked_calls() -> None:
    CheckedCalls.calls.clear()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with real data (MNIST/raw, JPEG images), named by IMAGEGEN_SHARED_DATA."""
    folder = os.environ.get("IMAGEGEN_SHARED_DATA")
    if not folder:
        pytest.skip("needs real data: IMAGEGEN_SHARED_DATA is not set")
    path = Path(folder)
    assert path.is_dir(), f"IMAGEGEN_SHARED_DATA names {folder}, which is not a folder"
    return path


@pytest.fixture(scope="session", autouse=True)
def _private_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No login, settings or runs of this machine's user are read or written."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("WANDB_"):
                patch.delenv(name)
        for name in ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
            folder = home / name.lower()
            folder.mkdir()
            patch.setenv(name, str(folder))
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("NETRC", str(home / "netrc"))
        patch.setenv("HOME", str(home))
        yield


@pytest.fixture(scope="session")
def forks(_private_environment: None) -> Iterator[Forks]:
    """Starts processes without the imports that take most of each."""
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture(autouse=True)
def _no_closed_logs() -> None:
    """Hydra's log of an earlier run may write to what has been closed or removed since."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, logging.StreamHandler) and getattr(
            handler.stream, "closed", handler.stream is None
        ):
            root.removeHandler(handler)


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """No test cuts the power; a short training would wait as long as it computes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which refuses what is not a file, too
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_network() -> Iterator[None]:
    """Connections to other machines fail; those within this one (wandb's own process) do not."""
    connect, connect_ex = socket.socket.connect, socket.socket.connect_ex

    def refuse_others(self: socket.socket, address: object) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            host = address[0] if isinstance(address, tuple) else address
            if host not in ("127.0.0.1", "::1", "localhost"):
                self.close()
                raise AssertionError(f"a test tried to connect to {host}: tests need no network")

    def guarded_connect(self: socket.socket, address: object) -> None:
        refuse_others(self, address)
        return connect(self, address)  # type: ignore[arg-type]

    def guarded_connect_ex(self: socket.socket, address: object) -> int:
        refuse_others(self, address)
        return connect_ex(self, address)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded_connect)
        patch.setattr(socket.socket, "connect_ex", guarded_connect_ex)
        yield
