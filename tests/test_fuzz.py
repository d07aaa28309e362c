"""Random mistakes in options, arguments and files: one sentence each, and nothing half-written."""

from __future__ import annotations

import contextlib
import io
import json
import resource
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from pytorch_lightning import Trainer

import sample
import train
from imagegen.checkpoint.reading import read_metadata
from imagegen.cli import entry as cli
from imagegen.cli.messages import report
from imagegen.core.build import build
from imagegen.core.errors import UserError
from imagegen.data.base import ImageDataset
from imagegen.data.convert import read_image
from imagegen.generation import job as sampling
from tests.fuzz import (
    SECONDS,
    TEXT,
    VALUES,
    Outcome,
    Picture,
    as_users_run_it,
    check,
    entries,
    leaves,
    pictures,
    run_command,
)
from tests.helpers import read, save_colour_checkpoint, save_tiny_checkpoint, write_image

MEMORY = 6 << 30
QUICK = 150  # examples of a quick test, at most
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
    ["dataset=image_folder", "dataset.root=photos", "dataset.size=4", "dataset.cache=../cache"],
    ["dataset=mnist", "dataset.root=nowhere", "dataset.download=false"],
]
"""What the options of a training command depend on."""

GROUPS = ["attention", "head", "model", "optimizer", "scheduler", "logger", "callbacks", "sweep"]

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


pytestmark = [
    pytest.mark.skipif(
        not Path("/proc/self/statm").exists(), reason="memory is limited and read as Linux does"
    ),
    # An interrupt may fall into a callback of the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def tried(examples: int) -> Callable[[Any], Any]:
    """How many examples are tried: always the same few, or many new ones."""
    quick = examples <= QUICK
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=quick,
        database=None,
        print_blob=not quick,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate] if quick else list(Phase),
    )


@pytest.fixture(autouse=True)
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


def fuzz_training(project: Path, examples: int) -> Counter[str]:
    """Options of train.py, in runs of one step."""
    names = {
        index: GROUPS
        + [name for name in leaves("train", [*SMALL, *choice]) if name not in UNTOUCHED]
        for index, choice in enumerate(CHOICES)
    }
    # What the first runs import takes longer than a run may, and Python 3.11 does not stand an
    # interrupt while shape checks are put into a module (SystemError, cpython issue 106905).
    for choice in CHOICES[:-1]:  # the last one has no data
        argv = [*SMALL, *choice, "hydra.run.dir=run"]
        assert refused_whole(project, train.main, argv, 300).status == 0

    ended: Counter[str] = Counter()

    @tried(examples)
    @given(settings_of(names))
    def once(chosen: tuple[int, list[str]]) -> None:
        index, typed = chosen
        argv = [*SMALL, *CHOICES[index], "hydra.run.dir=run", *typed]
        ended[how(refused_whole(project, train.main, argv))] += 1

    once()
    return ended


def fuzz_drawing(project: Path, examples: int) -> Counter[str]:
    """Options of sample.py, of all kinds of models and both tasks."""
    checkpoints = [
        save_tiny_checkpoint(project / "grey.ckpt"),
        save_tiny_checkpoint(project / "labels.ckpt", n_classes=10),
        save_colour_checkpoint(project / "colour"),
    ]
    # Kept from one command to the next, so that it is not taken for something half-written.
    build(read_metadata(checkpoints[2])["dataset"], ImageDataset).prepare()
    names = dict.fromkeys(range(len(checkpoints) * 2), leaves("sample"))
    ended: Counter[str] = Counter()

    @tried(examples)
    @given(settings_of(names))
    def once(chosen: tuple[int, list[str]]) -> None:
        index, typed = chosen
        task = [f"ckpt={checkpoints[index // 2]}", ["n=1", "task=complete"][index % 2]]
        ended[how(refused_whole(project, sample.main, [*task, "out=drawn", *typed]))] += 1

    once()
    return ended


def fuzz_arguments(project: Path, examples: int) -> Counter[str]:
    """Command lines with typing mistakes anywhere, and flags; what is right does nothing."""
    right = [
        *("dataset=mnist", "model.n_layers=3", "optimizer.lr=0.1", "attention=gla", "seed=3"),
        *("+trainer.fast_dev_run=true", "~optimizer.fused", "++model.d_ff=8", "head=categorical"),
        *("model.embedding.neighbours=[[0,-1]]", "trainer.max_time='00:00:01:00'", "-m", "--help"),
        *("--cfg=job", "--multirun", "--info", "--package=x", "--resolve", "--run", "-c", "all"),
    ]
    mistyped = st.tuples(
        st.sampled_from(right), st.integers(0, 40), st.integers(0, 2), TEXT.map(lambda t: t[:2])
    ).map(lambda typo: f"{typo[0][: typo[1]]}{typo[3]}{typo[0][typo[1] + typo[2] :]}")
    set_so = st.tuples(st.sampled_from(right), VALUES).map(
        lambda pair: f"{pair[0].partition('=')[0]}={pair[1]}"
    )
    typed = st.lists(st.one_of(mistyped, mistyped, set_so, TEXT), min_size=1, max_size=3)
    entry = cli.hydra_entry("train")(lambda config: None)

    ended: Counter[str] = Counter()

    @tried(examples)
    @given(typed)
    def once(argv: list[str]) -> None:
        several = any(text.startswith(("-m", "--m")) or "MULTIRUN" in text for text in argv)
        typed = ["hydra.sweep.dir=run" if several else "hydra.run.dir=run", *argv]
        ended[how(refused_whole(project, entry, typed))] += 1

    once()
    return ended


def fuzz_values(folder: Path, examples: int) -> Counter[str]:
    """As `fuzz_drawing`, from where the command line has become a configuration."""
    ckpt = save_tiny_checkpoint(folder / "labels.ckpt", n_classes=10)
    config = OmegaConf.to_container(cli.compose("sample", [f"ckpt={ckpt}", "out=drawn", "n=1"]))
    parser = OverridesParser.create()
    values = VALUES.map(lambda text: _parsed(parser, text))
    names = sorted(set(config) - {"ckpt", "dataset"})

    ended: Counter[str] = Counter()

    @tried(examples)
    @given(
        st.sampled_from(["sample", "complete"]),
        st.lists(st.tuples(st.sampled_from(names), values), min_size=1, max_size=3).map(dict),
    )
    def once(task: str, typed: dict[str, Any]) -> None:
        def entry() -> None:
            try:
                sampling.run({**config, "task": task, **typed})
            except KeyboardInterrupt:
                sys.exit(130)
            except Exception as error:
                report(error)
                sys.exit(1)

        argv = [f"{name}={value!r}" for name, value in typed.items()]
        ended[how(refused_whole(folder, entry, argv))] += 1

    once()
    return ended


def _parsed(parser: OverridesParser, text: str) -> Any:
    """What Hydra makes of a value; text where it would refuse it."""
    try:
        override = parser.parse_override(f"x={text}")
        return text if override.is_sweep_override() else override.value()
    except HydraException:
        return text


def fuzz_pictures(folder: Path, examples: int) -> Counter[str]:
    """Completions of whatever is named as an image, and grey and colour readings of it."""
    ckpt = save_colour_checkpoint(folder / "colour")
    options = [f"ckpt={ckpt}", f"out={folder / 'out'}", "task=complete", "resize=true"]
    options += ["completions=1", "device=cpu"]
    config = cli.compose("sample", options)

    ended: Counter[str] = Counter()

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
            with contextlib.redirect_stdout(io.StringIO()), as_users_run_it():
                sampling.run(config)
        except UserError as error:
            refusal = str(error)
        ended["refused" if refusal else "done"] += 1
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
    return ended


def refused_whole(
    project: Path, entry: Callable[[], Any], argv: list[str], seconds: float = SECONDS
) -> Outcome:
    """Run a command, check how it ended and what it left, and remove that."""
    before = entries(project)
    outcome = run_command(entry, argv, seconds)
    left = entries(project) - before
    summary = project / "run" / "summary.json"
    # A training that had begun says so, and how it ended.
    state = json.loads(summary.read_text())["state"] if summary.exists() else None
    for name in sorted(left, reverse=True):
        path = project / name
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    assert entries(project) == before, argv
    assert not any(".partial" in name for name in left), argv
    if check(outcome, argv):
        assert state in (None, "failed"), argv
        assert not left or state, f"{argv} leaves {sorted(left)[:5]}\n{outcome.err}"
    return outcome


def how(outcome: Outcome) -> str:
    """In a word, for the count."""
    return {0: "done", 130: "interrupted"}.get(outcome.status, "refused")


# Name, and the number of examples of the quick test and of the long one.
KINDS = {
    "training": (fuzz_training, 8, 200),
    "drawing": (fuzz_drawing, 8, 200),
    "arguments": (fuzz_arguments, 10, 200),
    "values": (fuzz_values, 120, 1000),
    "pictures": (fuzz_pictures, QUICK, 1000),
}


@pytest.mark.parametrize("kind", KINDS)
def test_mistakes(project: Path, kind: str) -> None:
    fuzz, few, _ = KINDS[kind]
    fuzz(project, few)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_mistakes(project: Path, kind: str) -> None:
    fuzz, _, many = KINDS[kind]
    ended = fuzz(project, many)
    # Shown by `pytest -s`; what a run has found is kept in benchmarks/results/robustness.md.
    print(f"\n{kind}: {ended.total()} inputs, {dict(ended)}")
    assert ended["refused"] > many // 4
