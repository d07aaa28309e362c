import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from imagegen.core.errors import UserError
from imagegen.data.convert import fit_image, read_image


def grey_ramp() -> np.ndarray:
    return np.arange(6 * 4, dtype=np.uint8).reshape(6, 4) * 10


def colours() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)


def saved(tmp_path: Path, image: Image.Image, name: str = "x.png", **options: object) -> Path:
    path = tmp_path / name
    image.save(path, **options)
    return path


def test_grey_and_colour_are_kept(tmp_path: Path) -> None:
    grey = read_image(saved(tmp_path, Image.fromarray(grey_ramp())), 1)
    assert grey.dtype == np.uint8
    assert np.array_equal(grey[..., 0], grey_ramp())
    colour = read_image(saved(tmp_path, Image.fromarray(colours())), 3)
    assert np.array_equal(colour, colours())


def test_grey_to_colour_repeats_and_colour_to_grey_is_luma(tmp_path: Path) -> None:
    repeated = read_image(saved(tmp_path, Image.fromarray(grey_ramp())), 3)
    assert np.array_equal(repeated, np.repeat(grey_ramp()[..., None], 3, axis=2))
    luma = read_image(saved(tmp_path, Image.fromarray(colours())), 1)
    expected = colours() @ np.array([0.299, 0.587, 0.114])
    assert np.abs(luma[..., 0] - expected).max() <= 1


@pytest.mark.parametrize("channels", [1, 3])
def test_transparency_lies_over_white(tmp_path: Path, channels: int) -> None:
    pixels = np.zeros((1, 3, 4), np.uint8)
    pixels[0, :, 3] = 0, 255, 51  # black: transparent, opaque, a fifth opaque
    image = read_image(saved(tmp_path, Image.fromarray(pixels)), channels)
    assert image.tolist() == [[[255] * channels, [0] * channels, [204] * channels]]


def test_grey_with_alpha(tmp_path: Path) -> None:
    pixels = np.array([[[100, 255], [100, 0]]], np.uint8)
    image = read_image(saved(tmp_path, Image.fromarray(pixels)), 1)
    assert image[..., 0].tolist() == [[100, 255]]


def test_palette_with_and_without_transparency(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1))
    image.putdata([0, 1])
    image.putpalette([10, 20, 30, 40, 50, 60])
    assert read_image(saved(tmp_path, image), 3).tolist() == [[[10, 20, 30], [40, 50, 60]]]
    path = saved(tmp_path, image, transparency=1)
    assert read_image(path, 3).tolist() == [[[10, 20, 30], [255, 255, 255]]]


def test_one_bit(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[True, False]]))
    assert read_image(saved(tmp_path, image), 1)[..., 0].tolist() == [[255, 0]]


@pytest.mark.parametrize("name", ["x.png", "x.tiff", "x.pgm"])
def test_sixteen_bits_keep_the_upper_eight(tmp_path: Path, name: str) -> None:
    values = np.array([[0, 255, 256, 0x8000, 0xABCD, 0xFFFF]], np.uint16)
    path = saved(tmp_path, Image.fromarray(values), name)
    assert read_image(path, 1)[..., 0].tolist() == [[0, 0, 1, 0x80, 0xAB, 0xFF]]
    assert read_image(path, 3)[0, 4].tolist() == [0xAB] * 3


def test_sixteen_bit_colour_keeps_the_upper_eight(tmp_path: Path) -> None:
    row = struct.pack(">B3H", 0, 0x1234, 0xABCD, 0xFFFF)

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    path = tmp_path / "x.png"
    header = struct.pack(">2I5B", 1, 1, 16, 2, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(row))
        + chunk(b"IEND", b"")
    )
    assert read_image(path, 3).tolist() == [[[0x12, 0xAB, 0xFF]]]


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_values_without_a_known_range_are_refused(tmp_path: Path, dtype: type) -> None:
    path = saved(tmp_path, Image.fromarray(np.ones((2, 2), dtype)), "odd.tiff")
    with pytest.raises(UserError, match=r"odd\.tiff.* 16-bit PNG"):
        read_image(path, 1)


def test_cmyk(tmp_path: Path) -> None:
    image = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    red = read_image(saved(tmp_path, image, "x.jpg", quality=100), 3)
    assert np.abs(red.astype(int) - [255, 0, 0]).max() <= 3


@pytest.mark.parametrize("name", ["x.png", "x.tiff", "x.webp"])
@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize(
    ("orientation", "shown"),
    [
        (2, np.fliplr),
        (3, lambda image: np.rot90(image, 2)),
        (5, lambda image: image.swapaxes(0, 1)),
        (6, lambda image: np.rot90(image, -1)),
        (8, np.rot90),
    ],
)
def test_camera_orientation_is_applied(
    tmp_path: Path,
    name: str,
    colour: bool,
    orientation: int,
    shown: Callable[[np.ndarray], np.ndarray],
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = colours() if colour else grey_ramp()
    options = {"lossless": True} if name == "x.webp" else {}
    path = saved(tmp_path, Image.fromarray(pixels), name, exif=exif, **options)
    found = read_image(path, 3 if colour else 1)
    assert np.array_equal(found if colour else found[..., 0], shown(pixels))


@pytest.mark.parametrize("name", ["x.gif", "x.webp", "x.png", "x.tiff"])
def test_the_first_image_of_several_counts(tmp_path: Path, name: str) -> None:
    first, second = (Image.new("RGB", (4, 4), colour) for colour in ("black", "white"))
    options = {"lossless": True} if name == "x.webp" else {}
    path = saved(tmp_path, first, name, save_all=True, append_images=[second], **options)
    assert read_image(path, 3).max() == 0


@pytest.mark.parametrize("name", ["x.png", "x.jpg", "x.webp", "x.gif", "x.tiff", "x.bmp"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.9])
def test_truncated_files_are_named(tmp_path: Path, name: str, share: float) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    path = saved(tmp_path, Image.fromarray(noise), name)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(UserError, match=f"{path} cannot be read"):
        read_image(path, 3)


def test_other_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_text("hello")
    with pytest.raises(UserError, match=r"x\.png cannot be read \(it is not an image\)"):
        read_image(tmp_path / "x.png", 3)
    with pytest.raises(UserError, match=r"none\.png does not exist"):
        read_image(tmp_path / "none.png", 3)
    with pytest.raises(UserError, match="channels=2"):
        read_image(tmp_path / "x.png", 2)


@pytest.mark.parametrize("side", [12_000, 40_000])
def test_huge_images_are_refused_unread(tmp_path: Path, side: int) -> None:
    path = saved(tmp_path, Image.new("1", (1, 1)))
    content = bytearray(path.read_bytes())
    content[16:24] = struct.pack(">2I", side, side)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"x\.png is too large"):
        read_image(path, 1)


def test_fit_keeps_an_image_of_the_right_size() -> None:
    assert np.array_equal(fit_image(colours(), 5, 7), colours())


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(4, 4), (3, 9), (16, 8), (1, 1)])
def test_fit_gives_the_size(channels: int, size: tuple[int, int]) -> None:
    image = np.random.default_rng(0).integers(0, 256, (9, 6, channels), dtype=np.uint8)
    fitted = fit_image(image, *size)
    assert fitted.shape == (*size, channels)
    assert fitted.dtype == np.uint8


def test_fit_takes_the_centre_and_averages() -> None:
    image = np.random.default_rng(0).integers(0, 256, (8, 16, 3), dtype=np.uint8)
    smaller = Image.fromarray(image).resize((8, 4), Image.Resampling.BICUBIC)
    difference = fit_image(image, 4, 4).astype(int) - np.array(smaller)[:, 2:6]
    assert np.abs(difference).max() <= 1
    stripes = np.zeros((64, 64, 1), np.uint8)
    stripes[::2] = 200
    assert np.abs(fit_image(stripes, 4, 4).astype(int) - 100).max() <= 2
