"""Random mistakes in options, arguments and files: one sentence each, and nothing half-written."""

from __future__ import annotations

import contextlib
import io
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pytorch_lightning import Trainer

import sample
import train
from imagegen import cli, sampling
from imagegen.data.convert import read_image
from imagegen.errors import UserError
from tests.fuzz import VALUES, Outcome, Picture, check, entries, leaves, pictures, run_command
from tests.helpers import read, save_colour_checkpoint, save_tiny_checkpoint, write_image

MEMORY = 6 << 30
SMALL = [
    *("model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=16"),
    *("trainer=cpu", "logger=none", "trainer.max_steps=1", "trainer.limit_val_batches=1"),
    *("callbacks.grids.n_samples=1", "callbacks.grids.n_completed=1"),
]
CHOICES = [
    [],
    ["attention=hybrid"],
    ["attention=lsh"],
    ["attention=strided"],
    ["attention=local"],
    ["attention=gated_delta"],
    ["attention=gla"],
    ["attention=ssd"],
    ["model=paper", "head=categorical", "scheduler=constant", "optimizer=radam"],
    ["callbacks=debug", "attention=retention"],
    ["dataset=image_folder", "dataset.root=photos", "dataset.size=4", "dataset.cache=cache"],
    ["dataset=mnist", "dataset.root=nowhere", "dataset.download=false"],
]
"""What the options of a training command depend on."""

UNTOUCHED = {
    # Would reach for the network, or for other processes.
    *("dataset.download", "trainer.num_nodes"),
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project of its own, which is the working directory; memory is limited."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "conf").symlink_to(cli.PROJECT_ROOT / "conf")
    monkeypatch.setattr(cli, "PROJECT_ROOT", folder)
    monkeypatch.chdir(folder)
    for i in range(8):
        write_image(folder / "photos" / f"{i}.png", (4, 4, 3), seed=i)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, hard))
    yield folder
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="memory is limited and read as Linux does"
)


def tried(examples: int) -> Callable[[Any], Any]:
    """How many examples are tried: always the same few, or many new ones."""
    quick = examples < 200
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=quick,
        database=None,
        print_blob=not quick,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate] if quick else list(Phase),
    )


def _one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training is one step, whatever its limits are, and never several processes."""
    fit = Trainer.fit

    def short(self: Trainer, *args: Any, **kwargs: Any) -> None:
        if self.world_size > 1:
            return
        self.limit_train_batches = 1
        self.limit_val_batches = min(self.limit_val_batches, 1)
        self.fit_loop.epoch_loop.max_steps = 1
        fit(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "fit", short)


def settings_of(names: dict[int, list[str]]) -> st.SearchStrategy[tuple[int, list[str]]]:
    """A choice of what the command is about, and one to three of its options set at random."""
    return st.sampled_from(sorted(names)).flatmap(
        lambda index: st.tuples(
            st.just(index),
            st.lists(
                st.tuples(st.sampled_from(names[index]), VALUES).map("=".join),
                min_size=1,
                max_size=3,
            ),
        )
    )


def fuzz_training(project: Path, monkeypatch: pytest.MonkeyPatch, examples: int) -> None:
    _one_step(monkeypatch)
    names = {
        index: [name for name in leaves("train", [*SMALL, *choice]) if name not in UNTOUCHED]
        for index, choice in enumerate(CHOICES)
    }

    @tried(examples)
    @given(settings_of(names))
    def once(chosen: tuple[int, list[str]]) -> None:
        index, typed = chosen
        refused_whole(project, train.main, [*SMALL, *CHOICES[index], "hydra.run.dir=run", *typed])

    once()


def fuzz_drawing(project: Path, examples: int) -> None:
    checkpoints = [
        save_tiny_checkpoint(project / "grey.ckpt"),
        save_tiny_checkpoint(project / "labels.ckpt", n_classes=10),
        save_colour_checkpoint(project / "colour"),
    ]
    names = dict.fromkeys(range(len(checkpoints) * 2), leaves("sample"))

    @tried(examples)
    @given(settings_of(names))
    def once(chosen: tuple[int, list[str]]) -> None:
        index, typed = chosen
        task = [f"ckpt={checkpoints[index // 2]}", ["n=1", "task=complete"][index % 2]]
        refused_whole(project, sample.main, [*task, "out=drawn", *typed])

    once()


def fuzz_pictures(folder: Path, examples: int) -> None:
    """Completions of whatever is named as an image, and grey and colour readings of it."""
    ckpt = save_colour_checkpoint(folder / "colour")
    options = [f"ckpt={ckpt}", f"out={folder / 'out'}", "task=complete", "resize=true"]
    options += ["completions=1", "device=cpu"]
    config = cli.compose("sample", options)

    @tried(examples)
    @given(pictures(), st.booleans())
    def once(picture: Picture, named: bool) -> None:
        place = folder / "in"
        file = place / picture.name
        place.mkdir()
        file.mkdir() if picture.content is None else file.write_bytes(picture.content)
        before = entries(folder)
        config.images = str(file if named else place)
        refusal = None
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                sampling.run(config)
        except UserError as error:
            refusal = str(error)
        if refusal is None:
            assert read(folder / "out/images/00000-original.png").shape == (4, 6, 3)
            images = [read_image(file, channels) for channels in (1, 3)]
            assert images[0].shape[:2] == images[1].shape[:2]
            if picture.size is not None:
                assert images[0].shape == (picture.size[1], picture.size[0], 1)
            shutil.rmtree(folder / "out")
        else:
            assert "\n" not in refusal
            assert len(refusal) < 1000
        assert entries(folder) == before
        shutil.rmtree(place)

    once()


def refused_whole(project: Path, entry: Callable[[], Any], argv: list[str]) -> Outcome:
    """Run a command, check how it ended and what it left, and remove that."""
    before = entries(project)
    outcome = run_command(entry, argv)
    refused = check(outcome, argv)
    left = entries(project) - before
    for name in sorted(left, reverse=True):
        path = project / name
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    if refused:
        assert not left, f"{argv} leaves {sorted(left)[:5]}\n{outcome.err}"
    else:
        assert not any(".partial" in name for name in left), argv
    assert entries(project) == before
    return outcome


def test_training_options(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fuzz_training(project, monkeypatch, 30)


def test_drawing_options(project: Path) -> None:
    fuzz_drawing(project, 60)


@pytest.mark.slow
def test_many_training_options(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fuzz_training(project, monkeypatch, 600)


@pytest.mark.slow
def test_many_drawing_options(project: Path) -> None:
    fuzz_drawing(project, 600)


def test_pictures(project: Path) -> None:
    fuzz_pictures(project, 150)


@pytest.mark.slow
def test_many_pictures(project: Path) -> None:
    fuzz_pictures(project, 3000)
