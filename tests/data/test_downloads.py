"""Downloads from mirrors that refuse, lie, or break off: one sentence or a clean retry."""

import gc
import gzip
import hashlib
import http.server
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torchvision
from packaging.version import Version
from torchvision import datasets

from imagegen.cli.entry import PROJECT_ROOT
from imagegen.core.errors import UserError
from imagegen.data.cifar10 import CIFAR10
from imagegen.data.mnist import MNIST, FashionMNIST
from tests.data.official import Arrays, check_splits, write_cifar, write_mnist

# torchvision leaves the sockets of failed requests to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

HTML = b"<!DOCTYPE html><html><body>Please log in to this network.</body></html>"
NAMES = [name for name, _ in datasets.MNIST.resources]


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.answer(self)  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None:
        pass


class Mirror:
    """A web server of this machine; `files` are what it has, `fault` how it answers."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.fault = "none"
        self.asked = 0
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self.server.daemon_threads = True
        self.server.answer = self._answer  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def _answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        self.asked += 1
        content = self.files[request.path.strip("/")]
        half = len(content) // 2
        if self.fault == "refuses":
            return request.send_error(503)
        if self.fault == "hangs up":
            return request.connection.shutdown(socket.SHUT_RDWR)
        if self.fault == "is not a web server":
            request.wfile.write(b"SSH-2.0-OpenSSH_9.9\r\n")
            return None
        request.send_response(200)
        if self.fault == "breaks off in a chunk":
            request.send_header("Transfer-Encoding", "chunked")
            request.end_headers()
            request.wfile.write(b"%x\r\n" % len(content) + content[:half])
            return None
        claimed = len(content)
        if self.fault == "sends half, and says all":
            content = content[:half]
        elif self.fault == "sends half":
            content = content[:half]
            claimed = half
        elif self.fault == "sends HTML":
            content, claimed = HTML, len(HTML)
        elif self.fault == "changes a byte":
            content = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
        request.send_header("Content-Length", str(claimed))
        request.end_headers()
        request.wfile.write(content)
        return None


FAULTS = [
    "refuses",
    "hangs up",
    "is not a web server",
    "breaks off in a chunk",
    "sends half, and says all",
    "sends half",
    "sends HTML",
    "changes a byte",
]


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    opened = Mirror()
    yield opened
    opened.server.shutdown()
    opened.server.server_close()
    gc.collect()  # here, where the warning is expected, and not in a later test


def offer_mnist(mirror: Mirror, folder: Path, patch: pytest.MonkeyPatch) -> Arrays:
    """Let torchvision look for MNIST at the mirror, and take what is there for official."""
    arrays = write_mnist(folder)
    raw = folder / "MNIST" / "raw"
    for name in NAMES:
        mirror.files[name] = gzip.compress((raw / name.removesuffix(".gz")).read_bytes(), mtime=0)
    sums = [(name, hashlib.md5(mirror.files[name]).hexdigest()) for name in NAMES]
    patch.setattr(datasets.MNIST, "mirrors", [mirror.url])
    patch.setattr(datasets.MNIST, "resources", sums)
    return arrays


def offer_cifar(mirror: Mirror, folder: Path, patch: pytest.MonkeyPatch) -> Arrays:
    """The same for CIFAR-10."""
    arrays = write_cifar(folder, patch)
    archive = folder / datasets.CIFAR10.filename
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder / "cifar-10-batches-py", "cifar-10-batches-py")
    content = archive.read_bytes()
    mirror.files[archive.name] = content
    patch.setattr(datasets.CIFAR10, "url", f"{mirror.url}{archive.name}")
    patch.setattr(datasets.CIFAR10, "tgz_md5", hashlib.md5(content).hexdigest())
    return arrays


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("cls", "offer"), [(MNIST, offer_mnist), (CIFAR10, offer_cifar)])
def test_a_mirror_that_fails_and_then_does_not(
    tmp_path: Path,
    mirror: Mirror,
    monkeypatch: pytest.MonkeyPatch,
    cls: type[MNIST] | type[CIFAR10],
    offer: Callable[[Mirror, Path, pytest.MonkeyPatch], Arrays],
    fault: str,
) -> None:
    arrays = offer(mirror, tmp_path / "elsewhere", monkeypatch)
    root = tmp_path / "data"
    mirror.fault = fault
    with pytest.raises(UserError, match=rf"could not be downloaded to {root} \(.+\); check") as no:
        cls(root).prepare()
    assert "\n" not in str(no.value)
    assert not root.exists()
    with pytest.raises(UserError, match="was not found"):
        cls(root).split("train")
    mirror.fault = "none"
    check_splits(cls(root), arrays)
    assert not [path for path in root.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(("cls", "offer"), [(MNIST, offer_mnist), (CIFAR10, offer_cifar)])
def test_ctrl_c_in_the_middle(
    tmp_path: Path,
    mirror: Mirror,
    monkeypatch: pytest.MonkeyPatch,
    cls: type[MNIST] | type[CIFAR10],
    offer: Callable[[Mirror, Path, pytest.MonkeyPatch], Arrays],
) -> None:
    arrays = offer(mirror, tmp_path / "elsewhere", monkeypatch)
    root, answer = tmp_path / "data", mirror._answer

    def half(request: http.server.BaseHTTPRequestHandler) -> None:
        if mirror.asked == len(mirror.files):  # so that MNIST has files that are whole
            mirror.fault = "sends half, and says all"
            os.kill(os.getpid(), signal.SIGINT)
        answer(request)

    mirror.server.answer = half  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        cls(root).prepare()
    assert not root.exists()
    mirror.fault = "none"
    mirror.server.answer = answer  # type: ignore[attr-defined]
    check_splits(cls(root), arrays)


def test_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    for cls in (MNIST, FashionMNIST, CIFAR10):
        with pytest.raises(UserError, match=r"name resolution.*\); check the network .*, or place"):
            cls(tmp_path / "data").prepare()
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("fault", ["refuses", "sends HTML", "sends half"])
def test_the_second_mirror_is_asked(
    tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault != "refuses" and Version(torchvision.__version__) < Version("0.27"):
        pytest.skip("torchvision before 0.27 asks no other mirror after a wrong file")
    arrays = offer_mnist(mirror, tmp_path / "elsewhere", monkeypatch)
    second = Mirror()
    second.files, mirror.fault = mirror.files, fault
    monkeypatch.setattr(datasets.MNIST, "mirrors", [mirror.url, second.url])
    check_splits(MNIST(tmp_path / "data"), arrays)
    assert second.asked >= len(NAMES)
    second.server.shutdown()
    second.server.server_close()


def test_only_what_is_missing_is_replaced(
    tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = offer_mnist(mirror, tmp_path / "data", monkeypatch)
    raw = tmp_path / "data" / "MNIST" / "raw"
    kept, lost = raw / "train-images-idx3-ubyte", raw / "t10k-labels-idx1-ubyte"
    before = kept.stat()
    lost.unlink()
    check_splits(MNIST(tmp_path / "data"), arrays)
    assert (kept.stat().st_ino, kept.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_files_in_place_ask_no_mirror(
    tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cls, offer in ((MNIST, offer_mnist), (CIFAR10, offer_cifar)):
        check_splits(cls(tmp_path), offer(mirror, tmp_path, monkeypatch))
    assert mirror.asked == 0


# The data's address is that of the mirror; the checksums are those of what it offers.
_DOWNLOAD = """
import sys
from torchvision import datasets
from imagegen.data.mnist import MNIST
datasets.MNIST.mirrors = [sys.argv[2]]
datasets.MNIST.resources = [tuple(pair.split(":")) for pair in sys.argv[3:]]
MNIST(sys.argv[1]).prepare()
"""


def _start_download(root: Path) -> "subprocess.Popen[bytes]":
    sums = [f"{name}:{checksum}" for name, checksum in datasets.MNIST.resources]
    return subprocess.Popen(
        [sys.executable, "-c", _DOWNLOAD, str(root), datasets.MNIST.mirrors[0], *sums],
        cwd=PROJECT_ROOT,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.slow
def test_a_download_that_is_killed_and_two_at_once(
    tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = offer_mnist(mirror, tmp_path / "elsewhere", monkeypatch)
    root = tmp_path / "data"
    answer, go_on = mirror._answer, threading.Event()

    def slowly(request: http.server.BaseHTTPRequestHandler) -> None:
        if mirror.asked >= 3:  # Each file is asked for twice: once for redirections.
            mirror.asked += 1
            go_on.wait(60)
        answer(request)

    mirror.server.answer = slowly  # type: ignore[attr-defined]
    process = _start_download(root)
    while mirror.asked < 4:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    go_on.set()
    with pytest.raises(UserError, match="was not found"):
        MNIST(root, download=False).prepare()

    both = [_start_download(root) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    check_splits(MNIST(root, download=False), arrays)
    raw = root / "MNIST" / "raw"
    assert sorted(f"{path.name}.gz" for path in raw.iterdir()) == sorted(NAMES)


def _full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk(tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = offer_mnist(mirror, tmp_path / "elsewhere", monkeypatch)
    root = tmp_path / "data"
    with monkeypatch.context() as patch:
        patch.setattr("torchvision.datasets.utils._decompress", _full)
        with pytest.raises(UserError, match=r"could not be downloaded .*No space left"):
            MNIST(root).prepare()
    assert not root.exists()
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, content in mirror.files.items():
        (raw / name).write_bytes(content)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", _full)
        with pytest.raises(UserError, match=r"\.gz cannot be unpacked .*No space left"):
            MNIST(root).prepare()
    assert sorted(os.listdir(raw)) == sorted(NAMES)
    check_splits(MNIST(root), arrays)
