"""Each file of conf/dataset builds a data set."""

from pathlib import Path

import pytest
import yaml

from imagegen.core.build import build
from imagegen.core.errors import UserError
from imagegen.data.base import ImageDataset, data_folder

CONFIGS = sorted((Path(__file__).parents[2] / "conf" / "dataset").glob("*.yaml"))


def test_all_are_there() -> None:
    names = {path.stem for path in CONFIGS}
    assert names == {"digits", "mnist", "fashion_mnist", "cifar10", "image_folder"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_builds(path: Path, tmp_path: Path) -> None:
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    if config.get("root") == "???":
        with pytest.raises(UserError, match=r"dataset\.root=<folder of images>"):
            build(config, ImageDataset)
        config["root"] = str(tmp_path)
    elif "root" in config:
        dataset = build(config, ImageDataset)
        assert dataset.root == data_folder()
    dataset = build(config, ImageDataset)
    assert dataset.name == path.stem
    assert dataset.spec.levels == (17 if path.stem == "digits" else 256)


def test_relative_roots_are_made_absolute_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mnist.MNIST", "image_folder.ImageFolder"):
        config = {"_target_": f"imagegen.data.{name}", "root": "pictures"}
        assert build(config, ImageDataset).root == tmp_path / "pictures"
