"""`imagegen compress`: the size of the code is the likelihood, and images come back."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from imagegen.cli.entry import compose
from imagegen.commands.registry import main
from imagegen.core.errors import UserError
from imagegen.core.machine import rounding
from imagegen.core.spec import ImageSpec
from imagegen.data.digits import Digits
from imagegen.evaluation import codec
from imagegen.evaluation.coding import decode, encode
from tests.helpers import (
    read,
    save_colour_checkpoint,
    save_tiny_checkpoint,
    tiny_model,
    write_image,
)

pytest.importorskip("constriction", reason="needs the extra codec")


@pytest.mark.parametrize(
    ("tokens", "order"), [("subpixel", "raster"), ("pixel", "raster"), ("pixel", "any")]
)
def test_code_is_as_long_as_the_likelihood_says(tokens: str, order: str) -> None:
    spec = ImageSpec(4, 6, 3)
    model = tiny_model(
        spec,
        tokens=tokens,
        order=order,
        embedding={"_target_": "imagegen.model.embeddings.Neighbourhood"},
    )
    images = (
        np.random.default_rng(0).normal(128, 20, (70, *spec.shape)).clip(0, 255).astype(np.uint8)
    )
    done: list[float] = []
    words = encode(model, images, done.append)
    bits = model.bits_per_dim(torch.from_numpy(images)).double().sum().item() * spec.dims
    # Rounded up to a word, and probabilities are rounded to 24 bits.
    assert bits - 1 <= 32 * len(words) <= bits * 1.002 + 64
    assert np.array_equal(decode(model, words, 70), images)
    assert sum(done) == pytest.approx(70)


def compress(*options: str) -> Path:
    return codec.compress(compose("compress", ["device=cpu", *options]))


def decompress(*options: str) -> Path:
    return codec.decompress(compose("decompress", ["device=cpu", *options]))


def test_round_trip_of_a_split(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from imagegen.generation.images import from_display

    out = compress(f"ckpt={ckpt}", "limit=20", f"out={tmp_path / 'digits.igc'}")
    size = out.stat().st_size
    assert f"20 images in {size} bytes, {size / 160:.4f} bits/dim" in capsys.readouterr().out
    folder = decompress(f"ckpt={ckpt}", f"file={out}", f"out={tmp_path / 'back'}")
    images = np.stack([read(path) for path in sorted(folder.iterdir())])
    assert np.array_equal(from_display(images, 17), Digits().split("test").images[:20])


def test_round_trip_of_photographs(tmp_path: Path) -> None:
    ckpt = save_colour_checkpoint(tmp_path)
    out = compress(
        f"ckpt={ckpt}", f"images={tmp_path / 'photos'}", f"out={tmp_path / 'photos.igc'}"
    )
    folder = decompress(f"ckpt={ckpt}", f"file={out}", f"out={tmp_path / 'back'}")
    for index in range(10):
        assert np.array_equal(
            read(folder / f"{index:05d}.png"), read(tmp_path / f"photos/{index}.png")
        )


def _changed(content: bytes, at: int) -> bytes:
    """Four bytes set to 255."""
    at %= len(content)
    return content[:at] + b"\xff" * 4 + content[at + 4 :]


def _without_place(content: bytes) -> bytes:
    """What follows the number of images, in the formats that did not say what rounded."""
    return content[12:28] + content[29 + content[28] :]


def _as_format_1(content: bytes, n: int) -> bytes:
    """The same code of `n` images in the first format, which had no CRC."""
    return b"IGC\x01" + n.to_bytes(4, "little") + _without_place(content)


def _as_format_2(content: bytes) -> bytes:
    rest = content[8:12] + _without_place(content)
    return b"IGC\x02" + zlib.crc32(rest).to_bytes(4, "little") + rest


def test_files_of_earlier_formats_are_read(ckpt: Path, tmp_path: Path) -> None:
    out = compress(f"ckpt={ckpt}", "limit=3", f"out={tmp_path / 'digits.igc'}")
    now = decompress(f"ckpt={ckpt}", f"file={out}", f"out={tmp_path / 'now'}")
    for old in (_as_format_1(out.read_bytes(), 3), _as_format_2(out.read_bytes())):
        file = tmp_path / "old.igc"
        file.write_bytes(old)
        before = decompress(f"ckpt={ckpt}", f"file={file}", f"out={tmp_path / 'before'}")
        assert [p.read_bytes() for p in sorted(now.iterdir())] == [
            p.read_bytes() for p in sorted(before.iterdir())
        ]


def test_another_machine_is_named(
    ckpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = compress(f"ckpt={ckpt}", "limit=3", f"out={tmp_path / 'digits.igc'}")
    monkeypatch.setattr(codec, "rounding", lambda device: f"{device} (AVX9)")
    decompress(f"ckpt={ckpt}", f"file={out}", f"out={tmp_path / 'back'}")
    said = capsys.readouterr().err
    assert f"written on {rounding(torch.device('cpu'))}; this is cpu (AVX9)" in said
    # As where the other machine does round otherwise.
    monkeypatch.setattr(
        "imagegen.evaluation.coding.decode", lambda *_: np.zeros((3, 8, 8, 1), np.uint8)
    )
    with pytest.raises(UserError, match=r"written on cpu \(.* and this is cpu \(AVX9\)"):
        decompress(f"ckpt={ckpt}", f"file={out}", f"out={tmp_path / 'again'}")
    assert not (tmp_path / "again").exists()


def test_refusals(ckpt: Path, tmp_path: Path) -> None:
    out = compress(f"ckpt={ckpt}", "limit=3", f"out={tmp_path / 'digits.igc'}")
    other = save_tiny_checkpoint(tmp_path / "other.ckpt", seed=1)
    content = out.read_bytes()
    back = f"out={tmp_path / 'back'}"

    def damaged(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        return f"file={tmp_path / name}"

    for options, sentence in (
        ([f"ckpt={other}", f"file={out}", back], "compressed with another checkpoint"),
        ([f"ckpt={ckpt}", damaged("cut", content[:-3]), back], "is damaged: it was cut off"),
        ([f"ckpt={ckpt}", damaged("short", content[:40]), back], "was cut off or changed"),
        # Four billion images were made room for before anything else was looked at.
        ([f"ckpt={ckpt}", damaged("many", _changed(content, 8)), back], "was cut off or changed"),
        ([f"ckpt={ckpt}", damaged("code", _changed(content, -4)), back], "was cut off or changed"),
        ([f"ckpt={ckpt}", damaged("format 2", _as_format_2(content)[:-1]), back], "was cut off"),
        ([f"ckpt={ckpt}", damaged("empty", _as_format_1(content, 0)), back], "holds no image"),
        ([f"ckpt={ckpt}", damaged("four", _as_format_1(content, 4)), back], "do not come back"),
        ([f"ckpt={ckpt}", damaged("png", b"PNG" * 9), back], "is not a file that"),
        ([f"ckpt={ckpt}", damaged("new", b"IGC\x09" + content[4:]), back], "has format 9, newer"),
        # Its CRC is then taken for the number of images.
        (
            [f"ckpt={ckpt}", damaged("one", b"IGC\x01" + content[4:]), back],
            "another checkpoint|was cut off or changed",
        ),
        ([f"ckpt={ckpt}", damaged("zero", b"IGC\x00" + content[4:]), back], "no format 0"),
        ([f"ckpt={ckpt}", "file=", back], "file=, but it must be one path"),
        ([f"ckpt={ckpt}", f"file=[{out}]", back], "must be one path"),
        ([f"ckpt={ckpt}", f"file={out}", "out="], "out=, but it must be one path"),
        ([f"ckpt={ckpt}", f"file={tmp_path / 'none'}", back], "cannot be read"),
        ([f"ckpt={ckpt}", back], "file is missing"),
        ([f"ckpt={ckpt}", f"file={out}"], "out is missing"),
    ):
        with pytest.raises(UserError, match=sentence):
            decompress(*options)
        assert not (tmp_path / "back").exists()
    for options, sentence in (
        ([f"ckpt={ckpt}"], "out is missing"),
        ([f"ckpt={ckpt}", "split=all", back], "split=all is unknown"),
        ([f"ckpt={ckpt}", f"images={tmp_path / 'none'}", back], "does not exist"),
    ):
        with pytest.raises(UserError, match=sentence):
            compress(*options)
        assert not (tmp_path / "back").exists()


def test_the_command(ckpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_image(tmp_path / "one.png", (8, 8))
    options = [f"ckpt={ckpt}", f"images={tmp_path / 'one.png'}", f"out={tmp_path / 'one.igc'}"]
    monkeypatch.setattr(sys, "argv", ["imagegen", "compress", *options])
    assert main() == 0
    assert (tmp_path / "one.igc").exists()
