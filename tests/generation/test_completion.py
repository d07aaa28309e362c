"""`sample.py task=complete`: what is completed, kept, written and refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import sample as sample_py
from imagegen.cli.entry import quoted
from imagegen.core.errors import UserError
from imagegen.data.digits import Digits
from imagegen.data.regions import read_region
from imagegen.generation import particles
from imagegen.generation.images import from_display, make_completion_grid, to_display
from tests.helpers import (
    manifest,
    read,
    read_images,
    run_main,
    sample,
    tree,
    write_image,
)


def test_completes_the_test_split(
    grey: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    sample(grey, out, "task=complete", "n=3", "visible=[0,0.5,0.9]", "completions=2")
    originals = Digits().split("test").images[:3]
    told = manifest(out)
    assert (told["n"], told["completions"], told["task"]) == (3, 2, "complete")
    assert told["grid"] == {"images": 3, "completions": 2}
    assert [entry["source"] for entry in told["images"]] == [f"digits/test/{i}" for i in range(3)]
    assert [entry["visible_rows"] for entry in told["images"]] == [0, 4, 7]
    drawn = []
    for entry, original in zip(told["images"], originals, strict=True):
        np.testing.assert_array_equal(read(out / entry["original"]), to_display(original, 17))
        completions = [read(out / name) for name in entry["completions"]]
        rows = entry["visible_rows"]
        for completion in completions:
            np.testing.assert_array_equal(
                from_display(completion, 17)[:rows], original[:rows], strict=True
            )
        assert (completions[0] != completions[1]).any()
        drawn.append(completions)
    np.testing.assert_array_equal(
        read(out / "grid.png"),
        make_completion_grid(to_display(originals, 17), np.array(drawn), [0, 4, 7]),
    )
    assert set(read_images(out)) == {
        f"{i:05d}-{what}.png" for i in range(3) for what in ("original", "1", "2")
    }
    assert "6 completions of 3 images" in capsys.readouterr().out


def test_defaults_of_completion(grey: Path, tmp_path: Path) -> None:
    sample(grey, tmp_path / "out", "task=complete")
    told = manifest(tmp_path / "out")
    assert (told["n"], told["completions"]) == (8, 4)
    assert {entry["visible_rows"] for entry in told["images"]} == {4}
    sample(grey, tmp_path / "greedy", "task=complete", "visible_rows=[1,2,3]", "temperature=0")
    told = manifest(tmp_path / "greedy")
    # A list asks for as many images; greedy completions of one image would all be the same.
    assert (told["n"], told["completions"]) == (3, 1)
    assert [entry["visible_rows"] for entry in told["images"]] == [1, 2, 3]


def test_completions_do_not_depend_on_batch_size_or_number(grey: Path, tmp_path: Path) -> None:
    sample(grey, tmp_path / "a", "task=complete", "n=3", "completions=3", "seed=5")
    sample(grey, tmp_path / "b", "task=complete", "n=2", "completions=2", "seed=5", "batch_size=1")
    a, b = read_images(tmp_path / "a"), read_images(tmp_path / "b")
    assert set(b) < set(a)
    for name, image in b.items():
        np.testing.assert_array_equal(image, a[name])


def test_completes_a_folder(colour: Path, tmp_path: Path) -> None:
    files = ["a.png", "b/c.png", "b/d.png"]
    images = [write_image(tmp_path / "in" / name, (4, 6, 3), i) for i, name in enumerate(files)]
    (tmp_path / "in" / "notes.txt").write_text("no image")
    (tmp_path / "in" / ".hidden.png").write_text("no image")
    out = tmp_path / "out"
    sample(
        colour, out, "task=complete", f"images={tmp_path / 'in'}", "visible_rows=2", "completions=2"
    )
    told = manifest(out)
    assert [entry["source"] for entry in told["images"]] == [
        str(tmp_path / "in" / name) for name in files
    ]
    for entry, image in zip(told["images"], images, strict=True):
        np.testing.assert_array_equal(read(out / entry["original"]), image)
        for name in entry["completions"]:
            np.testing.assert_array_equal(read(out / name)[:2], image[:2])


def test_completes_files_in_the_order_given(colour: Path, tmp_path: Path) -> None:
    for i, name in enumerate(["a.png", "b.png"]):
        write_image(tmp_path / name, (4, 6, 3), i)
    names = [str(tmp_path / name) for name in ("b.png", "a.png")]
    out = tmp_path / "out"
    sample(
        colour, out, "task=complete", f"images=[{','.join(names)}]", "visible=[0.25,0.5]",
        "completions=1",
    )  # fmt: skip
    entries = manifest(out)["images"]
    assert [entry["source"] for entry in entries] == names
    assert [entry["visible_rows"] for entry in entries] == [1, 2]
    sample(colour, out, "task=complete", f"images=[{','.join(names)}]", "n=1", "completions=1")
    assert [entry["source"] for entry in manifest(out)["images"]] == names[:1]


def test_what_it_drew_can_be_completed(grey: Path, tmp_path: Path) -> None:
    sample(grey, tmp_path / "first", "n=2")
    drawn = read_images(tmp_path / "first")
    sample(grey, tmp_path / "second", "task=complete", f"images={tmp_path / 'first' / 'images'}")
    second = read_images(tmp_path / "second")
    for i in range(2):
        np.testing.assert_array_equal(second[f"{i:05d}-original.png"], drawn[f"{i:05d}.png"])


def test_images_are_converted_where_the_meaning_is_clear(colour: Path, tmp_path: Path) -> None:
    grey_image = write_image(tmp_path / "in" / "grey.png", (4, 6))
    deep = grey_image.astype(np.uint16) * 257
    Image.fromarray(deep).save(tmp_path / "in" / "sixteen.png")
    Image.fromarray(grey_image).convert("P").save(tmp_path / "in" / "palette.png")
    sample(colour, tmp_path / "out", "task=complete", f"images={tmp_path / 'in'}", "completions=1")
    expected = np.repeat(grey_image[..., None], 3, axis=2)
    for i in range(3):
        found = read(tmp_path / "out" / "images" / f"{i:05d}-original.png")
        np.testing.assert_array_equal(found, expected)


def test_other_sizes_are_resized_on_demand(colour: Path, tmp_path: Path) -> None:
    write_image(tmp_path / "big.png", (12, 12, 3))
    sample(
        colour, tmp_path / "out", "task=complete", f"images={tmp_path / 'big.png'}", "resize=true"
    )
    assert read(tmp_path / "out/images/00000-original.png").shape == (4, 6, 3)


def test_images_that_cannot_be_completed_are_named(grey: Path, tmp_path: Path) -> None:
    write_image(tmp_path / "in" / "a.png", (8, 8))
    refused = tmp_path / "in" / "b.png"

    def complete(*overrides: str) -> None:
        sample(grey, tmp_path / "out", "task=complete", f"images={tmp_path / 'in'}", *overrides)

    write_image(refused, (9, 8))
    with pytest.raises(
        UserError, match=r"b\.png is 9x8 pixels \(height x width\), but the model draws 8x8; .*"
    ):
        complete()
    whole = refused.read_bytes()
    refused.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"b\.png cannot be read"):
        complete()
    refused.unlink()
    with pytest.raises(UserError, match="n=2, but images holds 1 in all"):
        complete("n=2")
    (tmp_path / "in" / "a.png").unlink()
    with pytest.raises(UserError, match=r"images=.*in holds no images \("):
        complete()
    assert tree(tmp_path) == {"in"}


def test_the_images_to_complete_are_not_replaced(grey: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sample(grey, out, "n=2")
    before = read_images(out)
    with pytest.raises(UserError, match=r"00000\.png is inside out=.*choose another out"):
        sample(grey, out, "task=complete", f"images={out / 'images'}")
    assert read_images(out).keys() == before.keys()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["completions=0"], "completions=0, but it must be a whole number"),
        (["visible=1"], "visible=1, but it must be a share of the rows"),
        (["visible=1.5"], "visible=1.5, but"),
        (["visible=-0.1"], "visible=-0.1, but"),
        (["visible=nan"], "visible=nan, but"),
        (["visible=[0.5,half]"], "visible=half, but"),
        (["visible=left:1"], "visible=left:1, but left: takes the share that is kept"),
        (["visible='rectangle:[6,6,3,3]'"], "ends at row 9 and column 9, but the images have 8x8"),
        (["visible=0.5", "mask=a.png"], "visible and mask are both given; choose one"),
        (["visible_rows=2", "mask=a.png"], "visible_rows and mask are both given"),
        (["mask=nowhere.png"], "mask=.*nowhere.png does not exist"),
        (["mask=[a,b]"], r"mask=\[a,b\], but it must be one path"),
        (["particles=0", "visible=left:0.5"], "particles=0, but it must be a whole number"),
        (["particles=9"], "particles=9 has no effect, because all that is kept comes before"),
        (["visible_rows=8"], "visible_rows=8, but it must be .* from 0 to 7"),
        (["visible_rows=-1"], "visible_rows=-1, but"),
        (["visible=0.5", "visible_rows=2"], "visible and visible_rows are both"),
        (["n=3", "visible=[0.5,0.2]"], "visible is a list of 2, but there are 3"),
        (["n=361"], "n=361, but the test split of digits holds 360 images"),
        (["visible=[]"], "visible is an empty list"),
        (["images=[]"], "images is empty"),
        (["images=nowhere"], "images=.*nowhere does not exist"),
        (["resize=maybe"], "resize=maybe, but it must be true or false"),
        (["dataset.root=x"], "Digits .*root"),
    ],
)
def test_refusals_leave_nothing(
    grey: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=sentence) as refusal:
        sample(grey, tmp_path / "below" / "out", "task=complete", *overrides)
    assert "\n" not in str(refusal.value)
    assert not tree(tmp_path)


def _kept_exactly(out: Path, visible: np.ndarray) -> None:
    """Every completion of each image shows its visible pixels, and others than the original's."""
    for entry, kept in zip(manifest(out)["images"], visible, strict=True):
        original = read(out / entry["original"])
        for name in entry["completions"]:
            completion = read(out / name)
            np.testing.assert_array_equal(completion[kept], original[kept])
            assert (completion[~kept] != original[~kept]).any()


def test_completes_regions(grey: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, words = tmp_path / "out", ["left:0.5", "hole:0.4", "random:0.3", "top:0.5", "0.25"]
    options = ["task=complete", f"visible=[{','.join(words)}]", "completions=2", "particles=40"]
    sample(grey, out, *options, "seed=4")
    told = manifest(out)
    assert [entry.get("visible") for entry in told["images"]] == [*words[:4], None]
    assert told["images"][4]["visible_rows"] == 2
    regions = [read_region(word) for word in words[:4]] + [read_region(0.25)]
    visible = np.stack([region.visible(8, 8, 4, i) for i, region in enumerate(regions)])
    _kept_exactly(out, visible)
    assert [entry.get("kept") for entry in told["images"]] == [
        *(each.mean() for each in visible[:4]), None,
    ]  # fmt: skip
    assert told["particles"] == 40
    assert set(told["particles_by_image"]) == {"00000", "00001", "00002"}
    report = told["particles_by_image"]["00002"]
    assert report["particles"] == 40
    assert 1 <= report["least_effective"] < 40
    assert 1 <= report["distinct"] <= 40
    originals = to_display(Digits().split("test").images[:5], 17)
    drawn = [[read(out / name) for name in entry["completions"]] for entry in told["images"]]
    np.testing.assert_array_equal(
        read(out / "grid.png"), make_completion_grid(originals, np.array(drawn), visible)
    )
    before = read_images(out)
    (out / "images" / "00001-2.png").unlink()
    sample(grey, out, *options, "seed=4", "resume=true")
    for name, image in read_images(out).items():
        np.testing.assert_array_equal(image, before[name])
    with pytest.raises(UserError, match=r"image 1 is .* with hole:0.4 \(.*\), not .* left:0.5 \("):
        sample(grey, out, *options, "seed=4", "resume=true", "visible=left:0.5", "n=5")
    with pytest.raises(UserError, match="holds a job with particles=40, not 41"):
        sample(grey, out, *options, "seed=4", "resume=true", "particles=41")
    assert "few particles" not in capsys.readouterr().out


def test_too_few_particles_are_told(
    grey: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(particles, "FEWEST", 0.9)
    sample(grey, tmp_path / "out", "task=complete", "n=2", "visible=random:0.5", "particles=20")
    said = capsys.readouterr().out
    assert "2 of 2 images were left with few particles, image" in said
    assert "use more (particles=80), or a model trained with model.order=any" in said


def test_completes_what_a_mask_does_not_keep(colour: Path, tmp_path: Path) -> None:
    for i, name in enumerate(["a.png", "b.png"]):
        write_image(tmp_path / "in" / name, (4, 6, 3), i)
    visible = np.random.default_rng(5).random((2, 4, 6)) < 0.5
    for name, kept in zip("ab", visible, strict=True):
        (tmp_path / "masks").mkdir(exist_ok=True)
        Image.fromarray(np.where(kept, 255, 0).astype(np.uint8)).save(
            tmp_path / "masks" / f"{name}.png"
        )
    out = tmp_path / "out"
    options = ["task=complete", f"images={tmp_path / 'in'}", "completions=2", "particles=20"]
    sample(colour, out, *options, f"mask={tmp_path / 'masks'}")
    _kept_exactly(out, visible)
    assert manifest(out)["images"][1]["mask"] == str(tmp_path / "masks" / "b.png")
    sample(colour, out, *options, f"mask={tmp_path / 'masks' / 'b.png'}")
    _kept_exactly(out, visible[[1, 1]])
    # Another picture of the same name is another region.
    Image.fromarray(np.where(visible[0], 255, 0).astype(np.uint8)).save(
        tmp_path / "masks" / "b.png"
    )
    with pytest.raises(UserError, match=r"image 0 is .*a\.png with .*b\.png \(region"):
        sample(colour, out, *options, f"mask={tmp_path / 'masks' / 'b.png'}", "resume=true")


def test_transparent_pixels_are_the_region(colour: Path, tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (4, 6, 4)).astype(np.uint8)
    kept = np.random.default_rng(1).random((4, 6)) < 0.5
    image[..., 3] = np.where(kept, 255, 0)
    (tmp_path / "in").mkdir()
    Image.fromarray(image).save(tmp_path / "in" / "a.png")
    write_image(tmp_path / "in" / "b.png", (4, 6, 3))
    options = ["task=complete", f"images={tmp_path / 'in'}", "particles=20"]
    sample(colour, tmp_path / "out", *options)
    half = np.repeat(np.arange(4) < 2, 6).reshape(4, 6)
    _kept_exactly(tmp_path / "out", np.stack([kept, half]))
    np.testing.assert_array_equal(
        read(tmp_path / "out" / "images" / "00000-1.png")[kept], image[..., :3][kept]
    )
    entries = manifest(tmp_path / "out")["images"]
    assert entries[0]["mask"] == "transparent pixels"
    assert entries[1]["visible_rows"] == 2
    # What is typed comes first.
    sample(colour, tmp_path / "out", *options[:-1], "visible=0.75")
    assert [entry["visible_rows"] for entry in manifest(tmp_path / "out")["images"]] == [3, 3]


def test_a_rectangle_is_typed_without_quotes(
    grey: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = ["visible=rectangle:[1,2,3,4]", "n=1", "completions=1", "particles=4"]
    arguments = [f"ckpt={grey}", "out=out", "device=cpu", "task=complete", *typed]
    assert run_main(monkeypatch, sample_py.main, "sample.py", *arguments) == 0
    (entry,) = manifest(tmp_path / "out")["images"]
    assert entry["visible"] == "rectangle:[1,2,3,4]"
    assert entry["kept"] == 1 - 12 / 64
    assert quoted("visible=[left:0.5,rectangle:[1,2,3,4]]") == (
        "visible=[left:0.5,'rectangle:[1,2,3,4]']"
    )
    assert quoted("visible='rectangle:[1,2,3,4]'") == "visible='rectangle:[1,2,3,4]'"
