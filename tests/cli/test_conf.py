"""Every choice that conf/ offers composes and builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from imagegen.attention.base import CausalAttention
from imagegen.cli.entry import PROJECT_ROOT, compose
from imagegen.core.build import build
from imagegen.core.spec import ImageSpec
from imagegen.data.base import ImageDataset
from imagegen.data.digits import Digits
from imagegen.heads.base import OutputHead
from imagegen.model.transformer import ImageTransformer
from imagegen.training.model_options import model_options
from imagegen.training.optimizers import build_optimizer

CONF = PROJECT_ROOT / "conf"


def _choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def _plain(*overrides: str) -> dict[str, Any]:
    cfg = compose("train", overrides)
    sections = {key: cfg[key] for key in cfg if key not in ("callbacks", "resume")}
    return OmegaConf.to_container(OmegaConf.create(sections), resolve=True)  # type: ignore[return-value]


@pytest.mark.parametrize("experiment", _choices("experiment"))
def test_experiments(experiment: str) -> None:
    config = _plain(f"experiment={experiment}")
    spec = build(config["dataset"], ImageDataset).spec if "root" not in config["dataset"] else None
    spec = spec or (ImageSpec(32, 32, 3) if "cifar" in experiment else ImageSpec(28, 28))
    with torch.device("meta"):
        model = ImageTransformer.from_options(spec, **model_options(config, Digits()))
    optimizer = instantiate(compose("train", [f"experiment={experiment}"]).optimizer)
    assert build_optimizer(optimizer, model).param_groups[0]["lr"] > 0


@pytest.mark.parametrize("experiment", _choices("experiment"))
def test_experiments_say_command_time_and_score(experiment: str) -> None:
    head = (CONF / "experiment" / f"{experiment}.yaml").read_text().partition("\ndefaults")[0]
    assert head.startswith(f"# @package _global_\n# python train.py experiment={experiment}")
    for word in ("bits/dim", "minutes" if "cpu" in experiment else "paper"):
        assert word in head


@pytest.mark.parametrize("choice", _choices("attention"))
def test_attentions(choice: str) -> None:
    build(_plain(f"attention={choice}")["attention"], CausalAttention, d_model=32, n_heads=4)


@pytest.mark.parametrize("choice", _choices("head"))
def test_heads(choice: str) -> None:
    build(_plain(f"head={choice}")["head"], OutputHead, d_model=32, levels=256)


@pytest.mark.parametrize("choice", _choices("dataset"))
def test_datasets(choice: str, tmp_path: Path) -> None:
    # An image folder needs files; the others know their images without any.
    if choice == "image_folder":
        config = compose("train", ["dataset=image_folder", f"dataset.root={tmp_path}"])
        assert config.dataset.root == str(tmp_path)
    else:
        assert build(_plain(f"dataset={choice}")["dataset"], ImageDataset).spec.dims >= 64


@pytest.mark.parametrize("choice", _choices("scheduler"))
def test_schedules_end_where_they_say(choice: str) -> None:
    schedule = instantiate(compose("train", [f"scheduler={choice}"]).scheduler)
    factors = [schedule.factor(i / 1000) for i in range(1001)]
    assert all(0 <= factor <= 1 for factor in factors)
    if choice == "cosine":
        assert factors[50] == pytest.approx(1)
        assert factors[-1] == pytest.approx(0.02)
        assert factors[25] == pytest.approx(0.5)
    else:
        assert set(factors) == {1.0}


@pytest.mark.parametrize("choice", _choices("optimizer"))
def test_optimizers(choice: str) -> None:
    layer = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    factory = instantiate(compose("train", [f"optimizer={choice}"]).optimizer)
    optimizer = build_optimizer(factory, layer)
    (layer.weight**2).sum().backward()
    optimizer.step()
    assert (layer.weight < 1).all()


@pytest.mark.parametrize("choice", _choices("trainer"))
@pytest.mark.parametrize("logger", _choices("logger"))
def test_trainers_and_loggers_compose(choice: str, logger: str) -> None:
    config = _plain(f"trainer={choice}", f"logger={logger}")
    assert config["trainer"]["_target_"] == "pytorch_lightning.Trainer"
    assert "_target_" in config["logger"]
