"""A second Ctrl-C, or SIGTERM, wherever it strikes: the last whole checkpoint stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from imagegen.checkpoint.reading import load_checkpoint
from imagegen.cli.entry import PROJECT_ROOT
from imagegen.training.run_folder import refuse_used_folder
from tests.forks import Forks
from tests.helpers import DRAWING, SMALL, write_image

# train.py that signals strike. Its first argument is a JSON list: the function in which they come,
# how often it is called there before, what its first argument ends with, and the signals.
CHILD = """
import json, os, signal, sys
from hydra.utils import get_object
import imagegen.training.run, imagegen.commands.train, train

def arm(where, passes, ending, signals):
    owner, _, name = where.rpartition(".")
    owner, seen = get_object(owner), 0
    function = getattr(owner, name)

    def struck(*args, **options):
        nonlocal seen
        if not ending or str(args[0]).endswith(ending):
            seen += 1
            if seen == passes + 1:
                print("struck", flush=True)
                for number in signals:
                    os.kill(os.getpid(), number)
        return function(*args, **options)

    setattr(owner, name, struck)

arm(*json.loads(sys.argv[1]))
sys.argv = ["train.py", *sys.argv[2:]]
train.main()
"""
INT, TERM = int(signal.SIGINT), int(signal.SIGTERM)


class Strike(NamedTuple):
    """Where signals strike, and whether the run has begun there; None where it is about to."""

    where: str
    passes: int = 0
    ending: str = ""
    begun: bool | None = True
    state: str = "interrupted"


STRIKES = [
    Strike("imagegen.training.run.build_dataset", begun=False),
    Strike("imagegen.training.run.ImageTransformer", begun=False),
    Strike("imagegen.training.run.prepare", begun=False),
    Strike("imagegen.training.run._write_config", begun=False),
    Strike("imagegen.core.files.os.fsync", begun=None),
    Strike("imagegen.core.files.os.fsync", 8),
    Strike("imagegen.training.module.ImageModule.training_step", 3),
    Strike("imagegen.training.module.ImageModule.on_save_checkpoint", 1),
    Strike("imagegen.training.module.ImageModule.validation_step", 1),
    Strike("imagegen.core.files.os.replace", 8),
    Strike("imagegen.core.files._beside", 1, "last.ckpt"),
    Strike("imagegen.core.files._beside", 1, "best.ckpt"),
    Strike("imagegen.training.callbacks.generate"),
    Strike("imagegen.training.callbacks.save_png", 1),
    Strike("imagegen.tracking.metrics_file.MetricsFile._append", 1),
    Strike("imagegen.training.run._close", state="finished"),
    Strike("imagegen.training.run.say_result", state="finished"),
]


TYPED = [*DRAWING, "callbacks.grids.n_completed=0", "trainer.log_every_n_steps=1"]


def _train(forks: Forks, *runs: tuple[Strike, list[int], list[str]]) -> tuple[list[int], str]:
    """The exit status of each run, and what all have said."""
    statuses, said = [], ""
    for strike, signals, typed in runs:
        done = forks.run(CHILD, json.dumps([*strike[:3], signals]), *typed)
        assert done.stdout.count("struck") == 1, (strike, done.stdout)
        assert "Traceback" not in done.stderr, done.stderr
        statuses.append(done.returncode)
        said += done.stderr
    return statuses, said


@pytest.mark.parametrize(
    ("signals", "strikes"),
    [
        ([INT, INT], STRIKES[6:8]),
        *(
            pytest.param(signals, STRIKES, marks=pytest.mark.slow)
            for signals in ([INT, INT], [TERM, TERM], [INT, TERM, INT])
        ),
    ],
)
def test_two_signals_at_once(
    tmp_path: Path, forks: Forks, signals: list[int], strikes: list[Strike]
) -> None:
    folders = [f"hydra.run.dir={tmp_path / str(number)}" for number in range(len(strikes))]
    runs = zip(strikes, folders, strict=True)
    statuses, error = _train(
        forks, *((strike, signals, [*TYPED, folder]) for strike, folder in runs)
    )
    assert statuses == [130] * len(strikes), error
    for number, strike in enumerate(strikes):
        run = tmp_path / str(number)
        assert not list(run.rglob("*.partial")), strike
        if strike.begun is None:
            refuse_used_folder({}, run)
            continue
        assert run.exists() == strike.begun, strike
        if strike.begun:
            summary = json.loads((run / "summary.json").read_text())
            assert summary["state"] == strike.state, strike
            for path in (run / "checkpoints").glob("*.ckpt"):
                load_checkpoint(path)
                assert torch.load(path, weights_only=True)["global_step"] <= 12


@pytest.mark.slow
def test_a_sweep_and_a_folder_of_images(tmp_path: Path, forks: Forks) -> None:
    """The other runs of a sweep do not begin; half of the converted images is not taken for all."""
    for number in range(20):
        write_image(tmp_path / "photos" / f"{number}.png", (8, 8), seed=number)
    images = ["dataset=image_folder", f"dataset.root={tmp_path / 'photos'}", "dataset.size=8"]
    images += ["dataset.channels=1", f"dataset.cache={tmp_path / 'cache'}"]
    images += [*TYPED, f"hydra.run.dir={tmp_path / 'run'}"]
    sweep = ["--multirun", *TYPED, "seed=0,1", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    step = Strike("imagegen.training.module.ImageModule.training_step", 2)
    statuses, error = _train(
        forks,
        (Strike("imagegen.data.image_cache.image_digests"), [INT, INT], images),
        (Strike("imagegen.data.image_cache._write"), [INT, TERM], images),
        (step, [INT, INT], sweep),
    )
    assert statuses == [130] * 3, error
    assert not (tmp_path / "run").exists()
    assert list((tmp_path / "cache").rglob("*.npy")) == []
    assert [path.name for path in (tmp_path / "sweep").iterdir() if path.is_dir()] == ["0"]
    load_checkpoint(tmp_path / "sweep" / "0" / "checkpoints" / "last.ckpt")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
@pytest.mark.parametrize("pause", [0.0, 0.4])
def test_two_processes(tmp_path: Path, pause: float) -> None:
    """A terminal sends Ctrl-C to all of them."""
    run = tmp_path / "run"
    typed = [text for text in SMALL if not text.startswith(("trainer.max_epochs", "callbacks"))]
    typed += ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "callbacks.grids=null"]
    typed += ["trainer.max_epochs=-1", "trainer.max_steps=100000", f"hydra.run.dir={run}"]
    process = subprocess.Popen(
        [sys.executable, "train.py", *typed],
        cwd=PROJECT_ROOT,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):  # the first validation
            break
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(pause)
    _, error = process.communicate(timeout=300)
    # The second may also meet an interpreter that is about to end.
    assert process.returncode in (1, 130, -signal.SIGINT), error
    assert "Traceback" not in error
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    load_checkpoint(run / "checkpoints" / "last.ckpt")
    assert json.loads((run / "summary.json").read_text())["state"] in ("interrupted", "failed")


INTERRUPTED_FINISH = """
import os, signal, sys
import imagegen.training.run, train
from imagegen.training.module import ImageModule

step, closed = ImageModule.training_step, imagegen.training.run._close

def training_step(self, *args):
    if self.trainer.global_step == 2:
        os.kill(os.getpid(), signal.SIGINT)
    return step(self, *args)

def close(*args):
    os.kill(os.getpid(), signal.SIGINT)
    closed(*args)
    print("not interrupted")

ImageModule.training_step, imagegen.training.run._close = training_step, close
train.main()
"""


def test_waiting_for_a_logger_can_be_interrupted(tmp_path: Path, forks: Forks) -> None:
    """wandb may take minutes to upload, and Lightning ignores Ctrl-C once it has come."""
    typed = [*SMALL, f"hydra.run.dir={tmp_path / 'run'}"]
    done = forks.run(INTERRUPTED_FINISH, *typed)
    assert (done.returncode, "not interrupted" in done.stdout) == (130, False), done.stderr
    assert "Traceback" not in done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["state"], summary["steps"]) == ("interrupted", 3)
