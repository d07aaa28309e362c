"""`imagegen evaluate maps=DIR`: pictures of the bits of pixels, and a table of the images."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from imagegen.checkpoint.reading import load_checkpoint
from imagegen.cli.entry import compose
from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.data.digits import Digits
from imagegen.evaluation.maps import Rival, Row, draw_map, heat, legend
from imagegen.evaluation.scores import classify_images, run, score_images
from imagegen.evaluation.surprise import bits_of_pixels
from imagegen.generation.images import CAPTION_HEIGHT, caption_fits
from imagegen.model.transformer import ImageTransformer
from tests.helpers import read, save_colour_checkpoint, save_tiny_checkpoint, tiny_model, tree


def evaluate(ckpt: Path, *overrides: str) -> dict[str, Any]:
    return run(compose("evaluate", [f"ckpt={ckpt}", *overrides]))


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "images.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_row_and_a_picture_for_each_image(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, folder = tmp_path / "score.json", tmp_path / "new" / "maps"
    result = evaluate(ckpt, "limit=30", "batch_size=7", f"maps={folder}", f"out={out}")
    names = {f"images/{index:05d}.png" for index in range(30)}
    assert tree(folder) == {"grid.png", "images", "images.csv", *names}
    assert json.loads(out.read_text()) == result

    split = Digits().split("test")
    assert split.labels is not None
    scores = score_images(tiny_model(Digits().spec), split.images[:30])
    assert result["bits_per_dim"] == pytest.approx(scores.mean(), rel=1e-6)
    rows = rows_of(folder)
    order = [int(row["index"]) for row in rows]
    assert order == np.argsort(-scores, kind="stable").tolist()
    for row, index in zip(rows, order, strict=True):
        assert float(row["bits_per_dim"]) == pytest.approx(scores[index], rel=1e-6)
        assert row["label"] == str(split.labels[index])
        assert row["source"] == f"digits/test/{index}"
        assert row["file"] in names

    printed = capsys.readouterr().out.splitlines()
    assert "bits/dim over 30 images" in printed[0]
    first = order[0]
    said = f"  {scores[first]:.4f} bits/dim  digits/test/{first} ({split.labels[first]})"
    assert printed[1] == said
    assert printed[6:] == [f"maps: {folder}"]


def test_pictures_show_the_image_beside_the_heat_of_its_pixels(ckpt: Path, tmp_path: Path) -> None:
    evaluate(ckpt, "limit=3", f"maps={tmp_path / 'maps'}")
    model = tiny_model(Digits().spec)
    images = Digits().split("test").images[:3]
    bits = bits_of_pixels(model, images)
    factor, padding = 14, 2  # 112 pixels high
    for index in range(3):
        picture = read(tmp_path / "maps" / "images" / f"{index:05d}.png")
        body = picture[2 * CAPTION_HEIGHT + padding : -CAPTION_HEIGHT - padding]
        left = body[factor // 2 :: factor, padding + factor // 2 :: factor][:, :8]
        np.testing.assert_array_equal(left[..., 0], np.round(images[index, ..., 0] / 16 * 255))
        start = 2 * padding + 8 * factor + factor // 2
        right = body[factor // 2 :: factor, start::factor]
        # One scale for all: red is full at a third of log2(17) bits, and so on.
        share = bits[index] / np.log2(17) * 3
        for channel in range(3):
            wanted = np.clip(share - channel, 0, 1) * 255
            np.testing.assert_allclose(right[..., channel], wanted, atol=1)
        assert right.std() > 10


def test_the_scale_goes_from_black_to_white() -> None:
    colours = heat(np.array([0, 1 / 3, 2 / 3, 1, 5.0]))
    assert colours.tolist() == [[0, 0, 0], [255, 0, 0], [255, 255, 0], [255] * 3, [255] * 3]
    strip = legend(230, ImageSpec(8, 8, 3, 256))
    assert strip.shape == (CAPTION_HEIGHT, 230, 3)
    for colour in colours:  # each is there, or one that is near
        assert np.abs(strip.astype(int) - colour).max(axis=-1).min() < 10


@pytest.mark.parametrize("spec", [ImageSpec(1, 1), ImageSpec(64, 1, 3), ImageSpec(2, 300, 3, 2)])
def test_strange_sizes(spec: ImageSpec) -> None:
    image, bits = np.zeros(spec.shape, dtype=np.uint8), np.zeros(spec.shape[:2])
    row = Row(1.5, 0, "a label", "a source that is far too long for one pixel", "images/00000.png")
    picture = draw_map(image, bits, spec, row)
    assert picture.shape[2] == legend(picture.shape[1], spec).shape[2] == 3


def test_files_are_named_and_colours_shown(tmp_path: Path) -> None:
    ckpt = save_colour_checkpoint(tmp_path, height=4, width=6)
    result = evaluate(ckpt, "split=train", f"maps={tmp_path / 'maps'}", "device=cpu")
    rows = rows_of(tmp_path / "maps")
    assert len(rows) == result["images"]
    assert result["most_surprising"][0]["source"] == rows[0]["source"]
    for row in rows:
        assert row["label"] == ""
        photo = read(tmp_path / "photos" / row["source"])
        picture = read(tmp_path / "maps" / row["file"])
        factor = 28  # 4 pixels become 112
        body = picture[CAPTION_HEIGHT + 2 + factor // 2 :: factor, 2 + factor // 2 :: factor]
        np.testing.assert_array_equal(body[:4, :6], photo)


def test_a_model_with_labels_scores_given_them(tmp_path: Path) -> None:
    ckpt = save_tiny_checkpoint(tmp_path / "tiny.ckpt", n_classes=10)
    for given in ("true", "false"):
        evaluate(ckpt, "limit=3", f"labels={given}", f"maps={tmp_path / given}")
    scores = [
        {row["index"]: row["bits_per_dim"] for row in rows_of(tmp_path / given)}
        for given in ("true", "false")
    ]
    assert scores[0] != scores[1]
    assert rows_of(tmp_path / "false")[0]["label"]  # known, whatever the model is told


def test_images_that_another_label_suits_better_come_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ckpt = save_tiny_checkpoint(tmp_path / "tiny.ckpt", n_classes=10)
    result = evaluate(ckpt, "limit=20", "classify=true", f"maps={tmp_path / 'maps'}")
    split = Digits().split("test")
    assert split.labels is not None
    labels = split.labels[:20]
    model = load_checkpoint(ckpt).model
    every = classify_images(model, split.images[:20]) * 64
    own = every[np.arange(20), labels]
    rows = rows_of(tmp_path / "maps")
    less = [float(row["bits_less"]) for row in rows]
    assert less == sorted(less, reverse=True)
    assert 0 == less[-1] < less[0]
    for row in rows:
        index = int(row["index"])
        assert float(row["bits_less"]) == pytest.approx(own[index] - every[index].min(), abs=1e-3)
        assert int(row["likeliest_label"]) == every[index].argmin()
        assert float(row["bits_per_dim"]) == pytest.approx(own[index] / 64, rel=1e-5)
    assert result["accuracy"] == (every.argmin(axis=1) == labels).mean()
    printed = capsys.readouterr().out.splitlines()
    assert "classified rightly" in printed[0]
    best = rows[0]["likeliest_label"]
    assert printed[1].endswith(f"({rows[0]['label']}; {less[0]:.1f} bits less as {best})")


def test_each_label_is_scored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt = save_tiny_checkpoint(tmp_path / "tiny.ckpt", n_classes=10)
    scored = []

    def log_prob(self: ImageTransformer, images: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is not None
        scored.extend(labels.tolist())
        return original(self, images, labels)

    original = ImageTransformer.log_prob
    monkeypatch.setattr(ImageTransformer, "log_prob", log_prob)
    evaluate(ckpt, "limit=7", "batch_size=4", "classify=true", f"maps={tmp_path / 'maps'}")
    assert sorted(scored) == sorted([*range(10)] * 7)


def test_comparing_labels_needs_a_model_that_knows_some(ckpt: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="classify=true needs a model trained with labels"):
        evaluate(ckpt, "classify=true", "limit=2", f"maps={tmp_path / 'maps'}")
    assert not (tmp_path / "maps").exists()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["maps=full"], r"folder .*full holds other files \(mine\); name a new or empty one"),
        (["maps=file"], "cannot write the folder .*file: a file of that name"),
        (["maps=file/below"], "cannot write .*below"),
        (["maps="], "maps=, but it must be one path"),
        (["maps=new", "classify=true", "precision=32"], "maps and precision do not go together"),
        (["maps=new", "visible=0.5"], "maps and visible do not go together"),
        (["maps=new", "precision=32"], "maps and precision do not go together"),
        (["maps=new", "out=new"], "out=.* is in maps="),
        (["maps=new", "out=new/score.json"], "out=.*new/score.json is in maps="),
        (["maps=new", "split=all"], "split=all is unknown"),
        (["maps=new/below", "ckpt=nowhere"], "nowhere does not exist"),
    ],
)
def test_refusals_leave_nothing(
    ckpt: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(UserError, match=sentence):
        evaluate(ckpt, *overrides)
    assert tree(tmp_path) == {"file", "full", "full/mine"}


def test_a_diverged_model_leaves_nothing(tmp_path: Path) -> None:
    path = save_tiny_checkpoint(tmp_path / "tiny.ckpt")
    content = torch.load(path, weights_only=True)
    content["state_dict"]["model.head.projection.bias"].fill_(torch.nan)
    torch.save(content, path)
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new"):
        with pytest.raises(UserError, match="image 0 as nan bits/dim"):
            evaluate(path, "limit=2", f"maps={tmp_path / name}")
    assert tree(tmp_path) == {"tiny.ckpt", "empty"}
    evaluate(save_tiny_checkpoint(path), "limit=2", f"maps={tmp_path / 'empty'}")
    assert len(rows_of(tmp_path / "empty")) == 2


def test_captions_fit_above_their_pictures() -> None:
    """Names are shortened until the figures fit too; what is short stays whole."""
    width = 226  # of square images of any size
    rival = Rival("Ankle boot", 129.2)
    row = Row(0.52148, 1247, "T-shirt/top", "fashion_mnist/test/1247", "images/01247.png", rival)
    assert row.captions(width) == [
        "0.521 bits/dim  fashion_mnist/test/1247",
        "T-shirt/top; 129.2 bits less as Ankle boot",
    ]
    unrivalled = Row(0.5, 7, "9", "mnist/test/7", "images/00007.png", Rival("9", 0.0))
    assert unrivalled.captions(width) == ["0.500 bits/dim  mnist/test/7", "9"]
    assert Row(0.5, 7, "", "a.png", "images/00007.png").captions(width) == ["0.500 bits/dim  a.png"]

    for letter in ("W", "i", "雪", "\x1b", "\udcff"):
        name = letter * 300
        row = Row(12345.67, 9, name, f"{name}7.png", "images/00009.png", Rival(name, 99999.9))
        captions = row.captions(width)
        assert all(caption_fits(line, width) for line in captions)
        assert captions[0].startswith("12345.670 bits/dim  ")
        assert captions[0].endswith("7.png")
        assert "; 99999.9 bits less as " in captions[1]


def test_any_file_name_can_be_said(tmp_path: Path) -> None:
    from imagegen.evaluation.maps import _write_table

    row = Row(1.5, 0, "", "a\x1b[2J\udcff.png", "images/00000.png")
    assert row.said == "1.5000 bits/dim  a\\x1b[2J\\udcff.png"
    _write_table(tmp_path / "images.csv", [row])
    assert "udcff.png" in (tmp_path / "images.csv").read_text(encoding="utf-8")
