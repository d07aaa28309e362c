"""Checkpoints that were made to do harm are refused quickly, and before memory is taken."""

from __future__ import annotations

import json
import resource
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from imagegen.checkpoint.export import export_safetensors
from imagegen.checkpoint.reading import FORMAT_VERSION, KEY, load_checkpoint, read_metadata
from imagegen.core.errors import UserError
from tests.helpers import TINY_MODEL, save_tiny_checkpoint

MEBIBYTE = 1 << 20
LINEAR = "imagegen.attention.linear.LinearAttention"
LOCAL = "imagegen.attention.local.LocalAttention"
LSH = "imagegen.attention.lsh.LSHAttention"
NEIGHBOURHOOD = "imagegen.model.embeddings.Neighbourhood"


@contextmanager
def sparing(most: int = 64 * MEBIBYTE, seconds: float = 5.0) -> Iterator[None]:
    """The block takes little memory and little time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    # Whoever tries to take more is refused by the system, and this machine is spared.
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 8 * most, hard))
    started = time.process_time()
    try:
        yield
        assert time.process_time() - started < seconds
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used
        assert grown * 1024 < most
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="memory is limited and read as Linux does"
)


@pytest.fixture(scope="module", autouse=True)
def _all_imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the first load imports counts for no later one."""
    load_checkpoint(save_tiny_checkpoint(tmp_path_factory.mktemp("first") / "best.ckpt"))


def _change_ckpt(folder: Path, change: Callable[[dict[str, Any]], None], **options: Any) -> Path:
    path = save_tiny_checkpoint(folder / "best.ckpt", **options)
    content = torch.load(path, weights_only=True)
    change(content[KEY])
    torch.save(content, path)
    return path


def _change_folder(folder: Path, change: Callable[[dict[str, Any]], None], **options: Any) -> Path:
    path = save_tiny_checkpoint(folder / "best.ckpt", **options)
    config = export_safetensors(path, folder / "export") / "config.json"
    metadata = json.loads(config.read_text())
    change(metadata)
    config.write_text(json.dumps(metadata))
    return folder / "export"


@pytest.fixture(params=[_change_ckpt, _change_folder], ids=["ckpt", "safetensors"])
def changed(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Path]:
    """Write a tiny checkpoint or its export, with another description than its own."""

    def write(change: Callable[[dict[str, Any]], None], **options: Any) -> Path:
        path: Path = request.param(tmp_path, change, **options)
        return path

    return write


@pytest.mark.parametrize(
    "sizes",
    [
        {"n_layers": 10**9},
        {"n_layers": 40},
        {"d_model": 10**7},
        {"d_model": 10**30},
        {"d_ff": 10**9},
        {"n_heads": 10**7},
        {"n_heads": 10**7, "head_dim": 1},
        {"head_dim": 10**6},
        {"attention": {"_target_": LINEAR, "feature_map": "taylor2"}, "head_dim": 10**6},
        {"attention": {"_target_": LINEAR, "feature_map": "favor", "n_features": 10**9}},
        {"attention": {"_target_": LINEAR, "feature_map": "fourier", "n_features": 10**12}},
        {"attention": {"_target_": LSH, "rounds": 10**9}},
        {"attention": {"_target_": LSH, "n_buckets": 10**10}},
        {"attention": {"_target_": "imagegen.attention.ssd.StateSpaceDuality", "d_state": 10**9}},
        {"attention": {"_target_": "imagegen.attention.gla.GatedLinearAttention", "expand_v": 1e9}},
        {"attention": {"_target_": "imagegen.attention.delta.DeltaNet", "conv_size": 10**9}},
        {"head": {**TINY_MODEL["head"], "n_mixtures": 10**10}},
        {"embedding": {"_target_": NEIGHBOURHOOD, "neighbours": [[-1, 0]] * 600}},
        {"n_classes": 10**9},
        {"convolution": [10**6, 10**6]},
        {"convolution": [0, 10**12]},
        {"n_layers": 1.5},
        {"n_layers": None},
        {"d_model": "many"},
        {"d_ff": True},
        {"dropout": "none"},
        {"attention": {"_target_": LINEAR, "chunk_size": "long"}},
        {
            "attention": {
                "_target_": "imagegen.attention.gla.GatedLinearAttention",
                "expand_v": 1e999,
            }
        },
    ],
    ids=lambda sizes: "-".join(str(value)[-30:] for value in sizes.values()),
)
def test_sizes_that_the_weights_do_not_have(tmp_path: Path, sizes: dict[str, Any]) -> None:
    path = _change_ckpt(tmp_path, lambda metadata: metadata["model"].update(sizes))
    with sparing(), pytest.raises(UserError, match=r"do not fit the model|a whole number"):
        load_checkpoint(path)


@pytest.mark.parametrize("sizes", [{"n_layers": 10**9}, {"d_model": 10**7}, {"n_heads": 10**7}])
def test_sizes_that_exported_weights_do_not_have(tmp_path: Path, sizes: dict[str, Any]) -> None:
    path = _change_folder(tmp_path, lambda metadata: metadata["model"].update(sizes))
    with sparing(), pytest.raises(UserError, match="do not fit the model that it describes"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"height": 10**6, "width": 10**6}, "at most 16777216 are supported"),
        ({"levels": 10**9}, "between 2 and 256"),
        ({"levels": 256}, "do not fit"),
        ({"channels": 10**20}, "at most"),
        ({"height": -1}, "at least 1"),
        ({"height": "8"}, "image spec must have"),
        # The weights of this model do not depend on the image, but its table of positions does.
        ({"height": 1 << 12, "width": 1 << 12}, r"takes 4\.0 GiB for tables"),
    ],
)
def test_images_that_no_model_draws(
    changed: Callable[..., Path], spec: dict[str, Any], sentence: str
) -> None:
    path = changed(lambda metadata: metadata["spec"].update(spec), d_model=128, n_heads=4)
    with sparing(), pytest.raises(UserError, match=sentence):
        load_checkpoint(path)


def test_a_window_beyond_all_images(changed: Callable[..., Path]) -> None:
    path = changed(
        lambda metadata: metadata["model"]["attention"].update(window=10**9),
        attention={"_target_": LOCAL},
    )
    with sparing(), pytest.raises(UserError, match=r"takes 119\.2 GiB for the state of an image"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "target",
    [LINEAR, LSH, "imagegen.attention.retention.Retention", "imagegen.attention.delta.DeltaNet"],
)
def test_chunks_are_no_longer_than_the_sequence(changed: Callable[..., Path], target: str) -> None:
    attention = {"_target_": target}
    wanted = load_checkpoint(changed(lambda metadata: None, attention=attention)).model
    path = changed(
        lambda metadata: metadata["model"]["attention"].update(chunk_size=1 << 40),
        attention=attention,
    )
    images = torch.randint(0, 17, (2, 8, 8, 1), generator=torch.Generator().manual_seed(0)).byte()
    with sparing(), torch.no_grad():
        scores = load_checkpoint(path).model.bits_per_dim(images)
    if target != LSH:  # What its positions see depends on the chunks.
        torch.testing.assert_close(scores, wanted.bits_per_dim(images).detach())


def test_a_newer_format_is_refused(changed: Callable[..., Path]) -> None:
    path = changed(lambda metadata: metadata.update(format_version=FORMAT_VERSION + 1))
    with pytest.raises(UserError, match=r"has checkpoint format 2, newer than the 1 .* update"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "metadata",
    [
        {"format_version": "1"},
        {"format_version": None},
        {"format_version": True},
        {"model": [1]},
        {"spec": 7},
        {"model": {}},
        {"spec": {}},
        {"config": {str(i): [0] * 100 for i in range(501)}},
        {"overrides": ["a=1"] * 5001},
        {"model": {**TINY_MODEL, "neighbours": [[-1, 0]] * 1000}},
    ],
    ids=lambda metadata: str(metadata)[:40],
)
def test_descriptions_that_are_none(changed: Callable[..., Path], metadata: dict[str, Any]) -> None:
    path = changed(lambda known: known.update(metadata))
    with (
        sparing(),
        pytest.raises(
            UserError, match=r"is not a set of options|not one|image spec must|not know: missing"
        ),
    ):
        load_checkpoint(path)


@pytest.mark.parametrize("target", ["os.system", "imagegen.cli.entry.os", "tests.helpers.Nothing"])
def test_foreign_classes_are_refused(changed: Callable[..., Path], target: str) -> None:
    path = changed(lambda metadata: metadata["model"].update(head={"_target_": target}))
    with pytest.raises(UserError, match="is not one of imagegen's OutputHead classes"):
        load_checkpoint(path)


def test_tensors_that_repeat_one_number(tmp_path: Path) -> None:
    path = save_tiny_checkpoint(tmp_path / "best.ckpt")
    content = torch.load(path, weights_only=True)
    width = 1 << 16
    content[KEY]["model"] = {**TINY_MODEL, "d_ff": width}
    content["state_dict"]["model.blocks.0.feed_forward.0.weight"] = torch.zeros(1).expand(width, 16)
    torch.save(content, path)
    with sparing(), pytest.raises(UserError, match="they claim to be larger than the file"):
        load_checkpoint(path)


def test_weights_that_are_none(tmp_path: Path) -> None:
    path = save_tiny_checkpoint(tmp_path / "best.ckpt")
    content = torch.load(path, weights_only=True)
    content["state_dict"]["model.norm.weight"] = "heavy"
    torch.save(content, path)
    with pytest.raises(UserError, match="do not fit"):
        load_checkpoint(path)


class Memory:
    """Takes ten gigabytes when it is unpickled, by a function that weights_only=True allows."""

    def __reduce__(self) -> Any:
        return bytearray, (10**10,)


def test_pickles_that_take_memory(tmp_path: Path) -> None:
    torch.save({KEY: Memory(), "state_dict": {}}, tmp_path / "memory.ckpt")
    with sparing(), pytest.raises(UserError, match="not a checkpoint of imagegen"):
        load_checkpoint(tmp_path / "memory.ckpt")


def test_pickles_that_hold_themselves_many_times(tmp_path: Path) -> None:
    path = save_tiny_checkpoint(tmp_path / "best.ckpt")
    content = torch.load(path, weights_only=True)
    bomb: list[Any] = [0]
    for _ in range(40):
        bomb = [bomb, bomb]
    content[KEY]["config"] = {"bomb": bomb}
    torch.save(content, path)
    with sparing(), pytest.raises(UserError, match="is not a set of options"):
        read_metadata(path)


def test_archives_that_unpack_to_more(tmp_path: Path) -> None:
    path = save_tiny_checkpoint(tmp_path / "best.ckpt")
    packed = tmp_path / "packed.ckpt"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry), zipfile.ZIP_DEFLATED)
        new.writestr("best/data/99", bytes(64 * MEBIBYTE))
    with sparing(), pytest.raises(UserError, match="not a checkpoint of imagegen"):
        load_checkpoint(packed)


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 1 << 30) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        struct.pack("<Q", 2) + b"{}" + bytes(40),
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 5) + b"[[[[[",
        b"\x01",
        b"",
        b"PK\x03\x04" + bytes(40),
    ],
)
def test_headers_of_safetensors(tmp_path: Path, header: bytes) -> None:
    folder = _change_folder(tmp_path, lambda metadata: None)
    (folder / "model.safetensors").write_bytes(header)
    with sparing(), pytest.raises(UserError, match="truncated or damaged, or is not a safetensors"):
        load_checkpoint(folder)


def test_a_header_that_claims_more_than_the_file_has(tmp_path: Path) -> None:
    folder = _change_folder(tmp_path, lambda metadata: None)
    entry = {"dtype": "F32", "shape": [10**6, 10**6], "data_offsets": [0, 4 * 10**12]}
    header = json.dumps({"norm.weight": entry}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with sparing(), pytest.raises(UserError, match="truncated or damaged"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100_000, "7", "[]", "null", '{"format_version": 1e999}', "\xff"]
)
def test_configs_that_are_none(tmp_path: Path, text: str) -> None:
    folder = _change_folder(tmp_path, lambda metadata: None)
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with sparing(), pytest.raises(UserError, match=r"does not describe a model|is damaged: it lac"):
        load_checkpoint(folder)


def test_a_config_that_is_too_long(tmp_path: Path) -> None:
    folder = _change_folder(tmp_path, lambda metadata: None)
    with (folder / "config.json").open("ab") as file:
        file.truncate(1 << 33)
    with sparing(), pytest.raises(UserError, match="does not describe a model"):
        load_checkpoint(folder)
