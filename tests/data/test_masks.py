"""Mask files: what they keep, which one belongs to an image, and which are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.data.masks import Masks, fit_mask, read_mask, read_opaque, read_visible

KEPT = np.random.default_rng(0).random((5, 7)) < 0.5
SPEC = ImageSpec(5, 7, 3)


def _save(path: Path, array: np.ndarray, mode: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(array)
    (image if mode is None else image.convert(mode)).save(path)
    return path


def _rgba(alpha: np.ndarray, seed: int = 1) -> np.ndarray:
    colour = np.random.default_rng(seed).integers(0, 256, (*alpha.shape, 3))
    return np.concatenate([colour, alpha[..., None]], axis=2).astype(np.uint8)


WHITE = np.where(KEPT, 255, 0).astype(np.uint8)
MASKS = {
    "grey": (WHITE, None),
    "colour": (WHITE, "RGB"),
    "bit": (WHITE, "1"),
    "palette": (WHITE, "P"),
    "zero and one": (KEPT.astype(np.uint8), None),
    "soft": (np.where(KEPT, 200, 90).astype(np.uint8), None),
    "sixteen bits": (np.where(KEPT, 65535, 0).astype(np.uint16), None),
    "alpha": (_rgba(WHITE), None),
    "soft alpha": (_rgba(np.where(KEPT, 130, 100)), None),
    "opaque": (np.dstack([WHITE] * 3 + [np.full_like(WHITE, 255)]), None),
    "grey and alpha": (_rgba(WHITE), "LA"),
}


@pytest.mark.parametrize("kind", MASKS)
def test_masks_of_every_kind(tmp_path: Path, kind: str) -> None:
    path = _save(tmp_path / "mask.png", *MASKS[kind])
    np.testing.assert_array_equal(read_mask(path, "a.png", 5, 7), KEPT)


def test_a_mask_has_the_size_of_its_image(tmp_path: Path) -> None:
    path = _save(tmp_path / "mask.png", WHITE)
    with pytest.raises(
        UserError, match=r"mask .*mask.png is 5x7 pixels \(height x width\), but image a.png is 7x5"
    ):
        read_mask(path, "a.png", 7, 5)


@pytest.mark.parametrize(("value", "what"), [(0, "nothing"), (255, "all"), (1, "all")])
def test_a_mask_has_to_keep_some(tmp_path: Path, value: int, what: str) -> None:
    mask = _save(tmp_path / "mask.png", np.full((5, 7), value, np.uint8))
    image = _save(tmp_path / "a.png", _rgba(WHITE)[..., :3])
    with pytest.raises(UserError, match=f"mask .*mask.png keeps {what} of the image; white"):
        read_visible([str(image)], Masks(mask), SPEC)


def test_broken_masks_are_named(tmp_path: Path) -> None:
    image = _save(tmp_path / "a.png", _rgba(WHITE)[..., :3])
    path = _save(tmp_path / "mask.png", WHITE)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(UserError, match=r"^mask .*mask\.png cannot be read"):
        read_visible([str(image)], Masks(path), SPEC)
    with pytest.raises(UserError, match=r"mask=.*nowhere does not exist"):
        Masks(tmp_path / "nowhere")
    (tmp_path / "empty" / ".hidden").mkdir(parents=True)
    _save(tmp_path / "empty" / ".hidden" / "a.png", WHITE)
    with pytest.raises(UserError, match=r"mask=.*empty holds no images"):
        Masks(tmp_path / "empty")


def test_a_folder_is_matched_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "masks"
    for name in ("a.png", "cats/b.png", "dogs/b.png"):
        _save(folder / name, WHITE)
    masks = Masks(folder)
    assert masks.of(tmp_path / "photos" / "a.jpg") == folder / "a.png"
    assert masks.of(tmp_path / "photos" / "dogs" / "b.jpg") == folder / "dogs" / "b.png"
    assert Masks(folder / "a.png").of(Path("anything")) == folder / "a.png"
    with pytest.raises(UserError, match=r"holds no mask for image x/c\.jpg; add one named c\.png"):
        masks.of(Path("x/c.jpg"))
    with pytest.raises(UserError, match=r"holds cats/b\.png and dogs/b\.png for image b\.jpg"):
        masks.of(Path("b.jpg"))


def test_transparent_pixels_are_drawn(tmp_path: Path) -> None:
    soft = np.where(KEPT, 255, 254)
    path = _save(tmp_path / "a.png", _rgba(soft))
    np.testing.assert_array_equal(read_opaque(path), KEPT)
    assert read_opaque(_save(tmp_path / "b.png", _rgba(np.full_like(WHITE, 255)))) is None
    assert read_opaque(_save(tmp_path / "c.png", WHITE)) is None
    found = read_visible([str(path), str(tmp_path / "c.png"), "digits/test/3"], None, SPEC)
    np.testing.assert_array_equal(found[0], KEPT)
    assert found[1:] == [None, None]
    nothing = _save(tmp_path / "d.png", _rgba(np.zeros_like(WHITE)))
    with pytest.raises(UserError, match=r"image .*d\.png keeps nothing of the image"):
        read_visible([str(nothing)], None, SPEC)


def test_a_mask_is_resized_with_its_image(tmp_path: Path) -> None:
    """Cropped to the centre, each pixel from the nearest."""
    large = np.repeat(np.repeat(WHITE, 4, axis=0), 4, axis=1)
    wide = np.pad(large, ((0, 0), (6, 6)), constant_values=255)
    mask = _save(tmp_path / "mask.png", wide)
    image = _save(tmp_path / "a.png", np.dstack([wide] * 3))
    (found,) = read_visible([str(image)], Masks(mask), SPEC)
    np.testing.assert_array_equal(found, KEPT)
    np.testing.assert_array_equal(fit_mask(wide > 0, 5, 7, "mask"), KEPT)


def test_a_mask_is_turned_as_its_image_is(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.rot90(WHITE).copy()).save(tmp_path / "mask.png", exif=exif)
    np.testing.assert_array_equal(read_mask(tmp_path / "mask.png", "a.png", 5, 7), KEPT)
