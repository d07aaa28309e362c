"""Continuing a run: every option is applied, refused or kept; a refused one leaves no trace."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from pytorch_lightning import Callback, Trainer

from imagegen.cli.entry import PROJECT_ROOT, compose
from imagegen.core.errors import UserError
from imagegen.core.moved import MODULES, NAMES
from imagegen.training import continuation
from imagegen.training.continuation import recall, refusal
from imagegen.training.schedules import Cosine
from tests.helpers import run_train, write_image

TINY = [
    "model.n_layers=1",
    "model.d_model=16",
    "model.n_heads=2",
    "model.d_ff=16",
    "trainer=cpu",
    "trainer.precision=32-true",
    "trainer.limit_train_batches=4",
    "trainer.limit_val_batches=1",
    "trainer.log_every_n_steps=1",
    "logger=none",
]
PLAIN = [*TINY, "callbacks.grids=null", "scheduler=constant"]


class Stop(Callback):
    """Presses Ctrl-C after a step, if it is to."""

    after = 0

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == Stop.after:
            os.kill(os.getpid(), signal.SIGINT)


class Spy(Callback):
    """Keeps what is at work in the first step, by the names of the options, and ends the run."""

    seen: ClassVar[dict[str, Any]] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        if not Spy.seen:
            Spy.seen = at_work(trainer, pl_module)
        trainer.should_stop = True


STOP, SPY = (
    f"+callbacks.x._target_=tests.training.test_continuation.{name}" for name in ("Stop", "Spy")
)


def rows(run: Path) -> list[dict[str, str]]:
    with open(run / "metrics.csv", newline="") as file:
        return [{**row, "train/images_per_second": ""} for row in csv.DictReader(file)]


def rates(run: Path) -> list[float]:
    return [float(row["lr-AdamW"]) for row in rows(run)]


def last(run: Path, name: str = "last") -> dict[str, Any]:
    found: dict[str, Any] = torch.load(run / f"checkpoints/{name}.ckpt", weights_only=True)
    return found


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def trace(run: Path) -> dict[str, tuple[int, bytes]]:
    """All that a command could change in a folder."""
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [run, *sorted(run.rglob("*"))]
    }


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


Make = Callable[..., Path]

CONF = PROJECT_ROOT / "conf"
GROUPS = "dataset model attention head optimizer scheduler trainer logger callbacks".split()

FIRST = [
    *TINY,
    "trainer.max_epochs=1",
    "callbacks.ema.decay=0.9",
    "callbacks.early_stopping.patience=5",
    "callbacks.grids.n_samples=0",
    "callbacks.grids.n_completed=0",
]
FOLDER = ["dataset=image_folder", "dataset.size=[4,6]", "batch_size=4", *FIRST]
# What is typed at `resume=` and has to be at work in the first step, for runs begun in these ways.
APPLIED: list[tuple[list[str], dict[str, Any]]] = [
    (
        FIRST,
        {
            "seed": 7,
            "batch_size": 16,
            "eval_batch_size": 24,
            "on_nan": "skip",
            "optimizer.lr": 0.5,
            "optimizer.betas": [0.5, 0.6],
            "optimizer.weight_decay": 0.25,
            "optimizer.fused": False,
            "scheduler.warmup": 0.5,
            "scheduler.floor": 0.25,
            "trainer.precision": "bf16-mixed",
            "trainer.max_epochs": 5,
            "trainer.max_time": "00:00:09:00",
            "trainer.gradient_clip_val": 0.5,
            "trainer.accumulate_grad_batches": 2,
            "trainer.val_check_interval": 0.5,
            "trainer.check_val_every_n_epoch": 2,
            "trainer.limit_train_batches": 6,
            "trainer.limit_val_batches": 2,
            "trainer.log_every_n_steps": 3,
            "trainer.num_sanity_val_steps": 1,
            "trainer.deterministic": True,
            "trainer.detect_anomaly": True,
            "callbacks.grids.folder": "/elsewhere",
            "callbacks.grids.n_samples": 2,
            "callbacks.grids.n_completed": 1,
            "callbacks.grids.completions": 1,
            "callbacks.grids.visible": 0.25,
            "callbacks.grids.every": 9,
            "callbacks.grids.seed": 4,
            "callbacks.best.dirpath": "/elsewhere",
            "callbacks.best.filename": "finest",
            "callbacks.best.monitor": "step",
            "callbacks.best.mode": "max",
            "callbacks.best.enable_version_counter": True,
            "callbacks.last.dirpath": "/elsewhere",
            "callbacks.last.filename": "latest",
            "callbacks.last.save_on_exception": False,
            "callbacks.last.enable_version_counter": True,
            "callbacks.learning_rate.logging_interval": "epoch",
            "callbacks.ema.decay": None,
            "callbacks.early_stopping.patience": 7,
            "callbacks.early_stopping.monitor": "train/bits_per_dim",
            "callbacks.early_stopping.mode": "max",
            "callbacks.early_stopping.min_delta": 0.125,
        },
    ),
    (
        [*FIRST, "optimizer=muon"],
        {
            "optimizer.lr": 0.5,
            "optimizer.momentum": 0.25,
            "optimizer.adam_lr": 0.125,
            "trainer.benchmark": True,
            "trainer.max_steps": 999,
            "optimizer.betas": [0.5, 0.6],
            "optimizer.weight_decay": 0.25,
        },
    ),
    (
        [*FIRST, "optimizer=radam"],
        {
            "optimizer.lr": 0.5,
            "optimizer.weight_decay": 0.25,
            "optimizer.decoupled_weight_decay": False,
            "trainer.enable_model_summary": True,
        },
    ),
    (FOLDER, {"dataset.root": "moved", "dataset.cache": "/elsewhere"}),
]
# What the objects that are built anew in each run are given.
GIVEN = {
    "trainer.accelerator": "gpu",
    "trainer.devices": 2,
    "trainer.num_nodes": 3,
    "trainer.strategy": "fsdp",
    "logger.project": "another",
    "logger.entity": "someone",
    "logger.name": "a-name",
    "logger.group": "a-group",
    "logger.tags": ["a-tag"],
    "logger.log_model": True,
}
BETWEEN = [
    "seed",
    "batch_size",
    "trainer.accumulate_grad_batches",
    "trainer.limit_train_batches",
]
"""What `test_what_an_epoch_is_made_of_changes_between_two_only` shows."""


def at_work(trainer: Any, module: Any) -> dict[str, Any]:
    """What a run does, by the names of its options; as typed where it is kept as typed."""
    found = {type(callback).__name__: callback for callback in trainer.callbacks}
    data, groups, grids = trainer.datamodule, trainer.optimizers[0].param_groups, found["Grids"]
    stopper, last = found["EarlyStopping"], trainer.checkpoint_callbacks[1]
    best = trainer.checkpoint_callbacks[0]
    dataset = data.dataset
    values = {
        "seed": data.seed if data.seed == found["ExactSteps"].seed else None,
        "batch_size": trainer.train_dataloader.batch_size,
        "eval_batch_size": data.eval_batch_size,
        "on_nan": found["BadNumbers"].policy,
        "dataset.root": Path(dataset.root).name if hasattr(dataset, "root") else None,
        "dataset.cache": str(getattr(dataset, "cache", None)),
        "optimizer.lr": groups[0]["initial_lr"],
        "optimizer.adam_lr": groups[-1]["initial_lr"],
        "optimizer.betas": list(groups[-1].get("betas", [])),
        "scheduler.warmup": module.schedule.warmup,
        "scheduler.floor": module.schedule.floor,
        "trainer.max_time": "00:00:09:00" if found["Timer"]._duration == 540 else None,
        "trainer.enable_model_summary": any("ModelSummary" in name for name in found),
        "trainer.deterministic": torch.are_deterministic_algorithms_enabled(),
        "trainer.benchmark": torch.backends.cudnn.benchmark,
        "trainer.detect_anomaly": trainer._detect_anomaly,
        "callbacks.grids.folder": str(grids.folder),
        "callbacks.learning_rate.logging_interval": found["LearningRateMonitor"].logging_interval,
        "callbacks.ema.decay": found.get("WeightAverage"),
    }
    for group in groups:
        values |= {f"optimizer.{name}": value for name, value in group.items() if "lr" not in name}
    values["optimizer.betas"] = list(groups[-1].get("betas", []))
    for section, thing in (("trainer", trainer), ("callbacks.grids", grids)):
        names = vars(thing).keys() | {"precision", "max_epochs", "max_steps", "log_every_n_steps"}
        for name in names - {"folder"}:
            values.setdefault(f"{section}.{name}", getattr(thing, name, None))
    for section, checkpoint in (("best", best), ("last", last)):
        for name in ("dirpath", "filename", "monitor", "mode", "save_on_exception"):
            values[f"callbacks.{section}.{name}"] = getattr(checkpoint, name)
        counts = checkpoint._enable_version_counter
        values[f"callbacks.{section}.enable_version_counter"] = counts
    for name in ("patience", "monitor", "mode", "min_delta"):
        values[f"callbacks.early_stopping.{name}"] = getattr(stopper, name)
    return values


def options_of(choice: Path) -> dict[str, Any]:
    """The options in a file of conf/, by their names on the command line."""
    found: Any = OmegaConf.to_container(OmegaConf.load(choice))
    found.pop("defaults", None)
    found.pop("hydra", None)
    nested = found if choice.parent == CONF else {choice.parent.name: found}
    return dict(continuation._leaves(nested))


def all_options() -> dict[str, Path]:
    """Every option of every choice, and a file that has it."""
    files = [CONF / "train.yaml", *(path for g in GROUPS for path in sorted((CONF / g).iterdir()))]
    found = {key: file for file in files for key in options_of(file)}
    return {
        key: file
        for key, file in found.items()
        if key != "resume" and (refusal(key) or not key.rpartition(".")[2].startswith("_"))
    }


def applied() -> list[str]:
    return [*(key for _, typed in APPLIED for key in typed), *GIVEN, "dataset.download"]


def test_every_option_is_applied_or_refused() -> None:
    options, shown = all_options(), applied()
    assert [key for key in options if not refusal(key) and key not in shown] == []
    assert [key for key in shown if refusal(key) or key not in options] == []
    assert len(options) > 110


@pytest.mark.parametrize("case", range(len(APPLIED)))
def test_an_applied_option_is_at_work_in_the_first_step(
    case: int, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, typed = APPLIED[case]
    if begun is FOLDER:
        for i in range(40):
            write_image(tmp_path / f"data/{i}.png", (4, 6, 3), seed=i)
        begun = [*begun, f"dataset.root={tmp_path / 'data'}", f"dataset.cache={tmp_path / 'cache'}"]
    run = make(*begun)
    if "dataset.root" in typed:
        (tmp_path / "data").rename(tmp_path / "moved")
    # Where a test may write.
    places = {"moved": str(tmp_path / "moved"), "/elsewhere": str(tmp_path / "elsewhere")}
    before = dict(continuation._leaves(last(run)["imagegen"]["config"]))
    arguments = []
    for key, value in typed.items():
        value = places.get(str(value), value)
        assert before[key] != value, key
        text = json.dumps(value) if not isinstance(value, str) else f"'{value}'"
        arguments.append(f"{key}={text}")
    monkeypatch.setattr(Spy, "seen", {})
    ends = [] if "trainer.max_epochs" in typed else ["trainer.max_epochs=2"]
    try:
        assert run_train(monkeypatch, f"resume={run}", SPY, *ends, *arguments) == 0
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False
    for key, value in typed.items():
        expected = places.get(str(value), value) if key != "dataset.root" else "moved"
        assert Spy.seen[key] == expected, key


def test_what_is_built_anew_is_given_what_is_typed(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(*PLAIN, "trainer.max_epochs=1")
    seen: dict[str, Any] = {}

    def logger(**options: Any) -> None:
        seen.update({f"logger.{name}": value for name, value in options.items()})

    def trainer(**options: Any) -> None:
        seen.update({f"trainer.{name}": value for name, value in options.items()})
        raise UserError("seen.")

    monkeypatch.setattr("imagegen.tracking.loggers.wandb_logger", logger)
    given = {key: json.dumps(value).replace('"', "") for key, value in GIVEN.items()}
    arguments = ["trainer.max_epochs=2", "logger=wandb"]
    arguments += [f"{key}={value}" for key, value in given.items() if key.startswith("logger")]
    assert run_train(monkeypatch, f"resume={run}", *arguments) == 0
    with monkeypatch.context() as patch:
        patch.setattr("pytorch_lightning.Trainer", trainer)
        arguments = ["trainer.gradient_clip_val=null", "trainer.max_epochs=3"]
        arguments += [f"{key}={value}" for key, value in given.items() if key.startswith("trainer")]
        assert run_train(monkeypatch, f"resume={run}", *arguments) == 1
    assert capsys.readouterr().err == "error: seen.\n"
    assert {key: seen[key] for key in GIVEN} == GIVEN


def _recall(
    before: dict[str, Any], now: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """`recall` of one option of a file that is typed; returns the configuration."""
    cfg, saved = (
        OmegaConf.create({"resume": "x.ckpt"}),
        OmegaConf.create({"resume": "x.ckpt"}),
    )
    for name in now.keys() - {"resume"}:
        OmegaConf.update(cfg, name, now[name], force_add=True)
        OmegaConf.update(saved, name, before[name], force_add=True)
    monkeypatch.setattr(
        continuation,
        "read_metadata",
        lambda path: {"config": OmegaConf.to_container(saved), "overrides": [], "dataset": {}},
    )
    monkeypatch.setattr(HydraConfig, "get", lambda: OmegaConf.create({"job": {"config_name": ""}}))
    monkeypatch.setattr("hydra.compose", lambda name, overrides: saved)
    recall(cfg, Path("/run"), [f"{key}={now[key]}"])
    return cfg


def test_a_refused_option_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, file in all_options().items():
        before = {
            name: None if "${" in str(value) or value == "???" else value
            for name, value in options_of(file).items()
        }
        now = {**before, key: "another"}
        if refusal(key):
            with pytest.raises(UserError) as refused:
                _recall(before, now, key, monkeypatch)
            named = f"cannot be resumed with {key}=another (it has {before[key]}): {refusal(key)}"
            assert named in str(refused.value)
        else:
            assert OmegaConf.select(_recall(before, now, key, monkeypatch), key) == "another"


def table() -> str:
    """The table of docs/resume.md."""
    options = all_options()
    kinds = {
        "applied": [k for k in options if not refusal(k) and k not in BETWEEN],
        "applied between two epochs, refused in the middle of one": BETWEEN,
        "refused": [k for k in options if refusal(k)],
    }
    lines = ["| options | when a run is resumed |", "|---|---|"]
    for kind, keys in kinds.items():
        shown: list[str] = []
        for section in dict.fromkeys(key.partition(".")[0] for key in keys):
            own = [key for key in keys if key.partition(".")[0] == section]
            whole = len(own) > 1 and own == [k for k in options if k.partition(".")[0] == section]
            shown += [f"{section}.*"] if whole else own
        lines.append(f"| {', '.join(f'`{key}`' for key in shown)} | {kind} |")
    return "\n".join(lines)


def test_the_table_in_the_documentation() -> None:
    assert table() in (PROJECT_ROOT / "docs" / "resume.md").read_text()


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Gives a copy of a run with the options given, which is trained once; statuses are 0 or 130.

    A copy, so that every test here continues a run that has been moved.
    """
    made: dict[tuple[str, ...], Path] = {}
    with pytest.MonkeyPatch.context() as patch:

        def make(*options: str) -> Path:
            copied = tmp_path_factory.mktemp("copied") / "run"
            if options not in made:
                made[options] = tmp_path_factory.mktemp("made") / "run"
                status = run_train(patch, *options, f"hydra.run.dir={made[options]}")
                assert status == (130 if STOP in options else 0)
            shutil.copytree(made[options], copied)
            return copied

        yield make


@pytest.fixture
def stopped(make: Make, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was interrupted in the middle of its second epoch of four steps."""
    monkeypatch.setattr(Stop, "after", 6)
    run = make(*PLAIN, STOP)
    monkeypatch.setattr(Stop, "after", 0)
    assert last(run)["global_step"] == 6
    return run


def test_typed_options_of_the_optimizer_take_effect_and_moments_are_kept(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(*PLAIN, "trainer.max_epochs=1")
    before = last(run)["optimizer_states"][0]["state"][0]
    typed = ["trainer.max_epochs=2", "optimizer.lr=0.02", "optimizer.weight_decay=0.9"]
    assert run_train(monkeypatch, f"resume={run}", *typed, "optimizer.betas=[1.0e-9,0.95]") == 0
    assert (
        "continues after step 4 with optimizer.lr=0.02 (0.001 until now), "
        "optimizer.betas=[1e-09, 0.95] ([0.9, 0.95] until now), "
        "optimizer.weight_decay=0.9 (0.01 until now), "
        "trainer.max_epochs=2 (1 until now)\n"
    ) in capsys.readouterr().out
    assert rates(run) == [0.001] * 4 + [0.02] * 4
    content = last(run)
    (group,) = content["optimizer_states"][0]["param_groups"]
    assert (group["lr"], group["weight_decay"], group["initial_lr"]) == (0.02, 0.9, 0.02)
    assert content["lr_schedulers"][0]["base_lrs"] == [0.02]
    after = content["optimizer_states"][0]["state"][0]
    assert (before["step"].item(), after["step"].item()) == (4, 8)
    # The second moment forgets little; begun afresh, it would hold four steps only.
    assert (after["exp_avg_sq"] >= 0.95**4 * before["exp_avg_sq"] * (1 - 1e-5)).all()


def test_an_option_that_needs_another_state_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(*PLAIN, "trainer.max_epochs=1")
    before = trace(run)
    typed = ["trainer.max_epochs=2", "+optimizer.amsgrad=true", "optimizer.fused=false"]
    assert run_train(monkeypatch, f"resume={run}", *typed) == 1
    assert (
        "the optimizer cannot continue with these options from the state" in capsys.readouterr().err
    )
    assert trace(run) == before


def test_a_run_of_an_earlier_version_goes_on_under_the_present_names(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the options that it had, though the modules of its classes are called otherwise now."""
    patient = "callbacks.early_stopping.patience=7"
    run = make(*PLAIN, "trainer.max_epochs=1", patient)
    content = last(run)
    metadata = content["imagegen"]
    metadata["overrides"].remove(patient)
    metadata["config"]["callbacks"]["early_stopping"]["min_delta"] = 0.25
    former = {name: old for old, name in [*MODULES.items(), *NAMES.items()]}

    def rename(config: Any) -> Any:
        if isinstance(config, dict):
            return {key: rename(value) for key, value in config.items()}
        if isinstance(config, str) and config in former:
            return rename(former[config])
        if isinstance(config, str) and (home := config.rpartition("."))[0] in former:
            return f"{former[home[0]]}.{home[2]}"
        return config

    for section in ("model", "config"):
        metadata[section] = rename(metadata[section])
    assert "imagegen.callbacks.early_stopping" in str(metadata)
    assert "imagegen.embedding." in str(metadata["model"])
    torch.save(content, run / "checkpoints/last.ckpt")
    assert run_train(monkeypatch, f"resume={run}", "trainer.max_epochs=2") == 0
    kept = OmegaConf.load(run / "config.yaml").callbacks.early_stopping
    assert (kept.patience, kept.min_delta) == (7, 0.25)
    assert kept._target_ == "imagegen.training.stopping.early_stopping"


def test_what_is_not_typed_stays_as_the_run_began(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though this version may have other defaults; nothing that could run code is taken over."""
    run = make(*PLAIN, "trainer.max_epochs=1")
    content = last(run)
    config = content["imagegen"]["config"]
    config["optimizer"]["lr"] = 0.005
    config["model"]["dropout"] = content["imagegen"]["model"]["dropout"] = 0.25
    config["callbacks"]["rates"]["_target_"] = "os.system"
    config["trainer"]["log_every_n_steps"] = "${oc.env:HOME}"
    torch.save(content, run / "checkpoints/last.ckpt")
    assert run_train(monkeypatch, f"resume={run}", "trainer.max_epochs=2") == 0
    assert rates(run)[4:] == [0.005] * 4
    kept = OmegaConf.load(run / "config.yaml")
    assert (kept.optimizer.lr, kept.model.dropout) == (0.005, 0.25)
    assert kept.callbacks.rates._target_ == "imagegen.training.callbacks.Rates"
    assert kept.trainer.log_every_n_steps == 1
    # Typed, the default of this version counts.
    typed = ["trainer.max_epochs=3", "optimizer.lr=0.001"]
    assert run_train(monkeypatch, f"resume={run}", *typed) == 0
    assert rates(run)[8:] == [0.001] * 4


def test_a_run_of_before_an_option_of_the_model_continues_without_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default of this version would make another model."""
    run = make(*PLAIN, "trainer.max_epochs=1", "head.categorical=false")
    content = last(run)
    metadata = content["imagegen"]
    for head in (metadata["config"]["head"], metadata["model"]["head"]):
        head.pop("categorical", None)  # they may be one object
    metadata["overrides"].remove("head.categorical=false")
    torch.save(content, run / "checkpoints/last.ckpt")
    assert run_train(monkeypatch, f"resume={run}", "trainer.max_epochs=2") == 0
    assert "categorical" not in OmegaConf.load(run / "config.yaml").head
    assert (
        run_train(monkeypatch, f"resume={run}", "trainer.max_epochs=3", "head.categorical=true")
        == 1
    )


def test_the_first_step_after_a_raised_limit_has_the_rate_of_the_new_schedule(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(*TINY, "callbacks.grids=null", "trainer.max_epochs=1")
    assert run_train(monkeypatch, f"resume={run}", "trainer.max_epochs=3") == 0
    cosine = Cosine(0.05, 0.02)
    assert rates(run)[:4] == [0.001 * cosine.factor((step + 1) / 4) for step in range(4)]
    assert rates(run)[4:] == [0.001 * cosine.factor((step + 1) / 12) for step in range(4, 12)]


def test_the_schedule_goes_on_from_its_epoch_where_epochs_get_shorter(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the batch size for the second and third of four epochs."""
    options = [*TINY, "callbacks.grids=null", "scheduler.warmup=0"]
    run = make(*options, "trainer.max_epochs=1", "trainer.limit_train_batches=8")
    half = ["batch_size=64", "trainer.limit_train_batches=4", "trainer.max_epochs=3"]
    assert run_train(monkeypatch, f"resume={run}", *half) == 0
    back = ["batch_size=32", "trainer.limit_train_batches=8", "trainer.max_epochs=4"]
    assert run_train(monkeypatch, f"resume={run}", *back) == 0
    factor = Cosine(0.0, 0.02).factor
    shares = [(step + 1) / 8 for step in range(8)]
    shares += [(4 + step + 1) / 12 for step in range(8)]
    shares += [(24 + step + 1) / 32 for step in range(8)]
    assert rates(run) == pytest.approx([0.001 * factor(share) for share in shares], rel=1e-12)


def test_a_schedule_that_needs_an_end_is_refused_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = [*TINY, "callbacks.grids=null", "trainer.max_epochs=-1"]
    run = tmp_path / "run"
    assert run_train(monkeypatch, *endless, f"hydra.run.dir={run}") == 1
    error = capsys.readouterr().err
    assert error == (
        "error: the schedule Cosine follows the training to its end, but this training has none; "
        "limit it with trainer.max_epochs, trainer.max_steps or trainer.max_time, or choose "
        "scheduler=constant.\n"
    )
    assert not run.exists()


def test_a_moved_run_keeps_its_best_checkpoint(
    make: Make, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    run = make(*PLAIN, "trainer.max_epochs=2")
    before = (run / "checkpoints/best.ckpt").read_bytes()
    # Weights that get worse. How often it saves may change with it.
    typed = ["trainer.max_epochs=4", "optimizer.lr=10", "+callbacks.best.every_n_epochs=2"]
    assert run_train(monkeypatch, f"resume={run}", *typed) == 0
    assert float(rows(run)[-1]["val/bits_per_dim"]) > summary(run)["best_bits_per_dim"] + 0.1
    assert (run / "checkpoints/best.ckpt").read_bytes() == before
    assert summary(run)["best_checkpoint"] == "checkpoints/best.ckpt"
    assert last(run)["global_step"] == 16
    assert not [warning for warning in recwarn if "dirpath" in str(warning.message)]


def test_a_run_that_goes_on_elsewhere_leaves_the_first_as_it_is(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(*PLAIN, "trainer.max_epochs=2")
    before, elsewhere = trace(run), tmp_path / "elsewhere"
    typed = ["trainer.max_epochs=3", "optimizer.lr=10", f"hydra.run.dir={elsewhere}"]
    assert run_train(monkeypatch, f"resume={run}", *typed) == 0
    assert trace(run) == before
    found = summary(elsewhere)
    assert (found["steps"], found["best_checkpoint"]) == (12, "checkpoints/best.ckpt")
    assert last(elsewhere, "best")["global_step"] == 12


def test_a_run_and_its_data_can_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit as a run that stayed: weights, moments, scores, the best checkpoint, pictures."""
    for i in range(40):
        write_image(tmp_path / f"data/class{i % 2}/{i}.png", (4, 6, 3), seed=i)
    options = [*TINY, "scheduler=constant", "dataset=image_folder", "dataset.size=[4,6]"]
    options += ["batch_size=8", "model.conditional=true", "model.dropout=0.2", "head=logistics"]
    options += ["callbacks.ema.decay=0.9", "callbacks.grids.every=2", "optimizer.lr=1"]
    options += ["callbacks.grids.n_samples=2", "callbacks.grids.n_completed=1"]
    options += [f"dataset.cache={tmp_path / 'cache'}"]
    stays, first = tmp_path / "stays", tmp_path / "first"
    folder = [f"dataset.root={tmp_path / 'data'}"]
    typed = [*options, *folder, "trainer.max_epochs=3", f"hydra.run.dir={stays}"]
    assert run_train(monkeypatch, *typed) == 0

    typed = [*options, *folder, "trainer.max_epochs=1", f"hydra.run.dir={first}"]
    assert run_train(monkeypatch, *typed) == 0
    second, third = tmp_path / "disk/second", tmp_path / "third"
    second.parent.mkdir()
    first.rename(second)
    (tmp_path / "data").rename(tmp_path / "disk/photos")
    typed = ["trainer.max_epochs=2", f"dataset.root={tmp_path / 'disk/photos'}"]
    assert run_train(monkeypatch, f"resume={second}", *typed) == 0
    second.rename(third)
    assert run_train(monkeypatch, f"resume={third}", "trainer.max_epochs=3") == 0

    assert rows(third) == rows(stays)
    # Moved twice since it was found.
    assert last(stays, "best")["global_step"] == 3
    for name in ("last", "best"):
        found, expected = last(third, name), last(stays, name)
        for key in ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers"):
            assert equal(found[key], expected[key]), (name, key)
        assert found["global_step"] == expected["global_step"]
    pictures = sorted(path.name for path in (stays / "samples").iterdir())
    assert sorted(path.name for path in (third / "samples").iterdir()) == pictures
    for name in pictures:
        assert (third / "samples" / name).read_bytes() == (stays / "samples" / name).read_bytes()
    for key in ("state", "best_bits_per_dim", "best_checkpoint", "steps", "epochs"):
        assert summary(third)[key] == summary(stays)[key]


REFUSALS = {
    (): "has already finished (trainer.max_epochs=2); raise the limit",
    ("trainer.max_epochs=1",): "has done 2 epochs already, more than trainer.max_epochs=1; raise",
    (
        "trainer.max_epochs=9",
        "trainer.max_steps=3",
    ): "has already finished (trainer.max_epochs",
    ("trainer.max_epochs=9", "trainer.max_time=00:00:00:00"): "leaves no time to train",
    ("trainer.max_epochs=9", "model.n_layers=2"): "model.n_layers=2 (it has 1): the weights are",
    ("trainer.max_epochs=9", "attention=softmax"): "SoftmaxAttention (it has imagegen.attention.li",
    ("trainer.max_epochs=9", "optimizer=radam"): "optimizer._target_=torch.optim.RAdam (it has tor",
    ("trainer.max_epochs=9", "dataset=mnist"): "dataset._target_=imagegen.data.mnist.MNIST (it has",
    ("trainer.max_epochs=-1", "scheduler=cosine"): "follows the training to its end, but this",
    ("trainer.max_epochs=9", "callbacks.best.monitor=val/loss"): "callbacks.best.monitor=val/loss",
    ("trainer.max_epochs=9", "+trainer.fast_dev_run=true"): "fast_dev_run only tries a new run",
    ("trainer.max_epochs=9", "batch_size=0"): "batch_size=0",
    ("trainer.max_epochs=9", "trainer.val_check_interval=1.5"): "the trainer rejects its settings",
    ("trainer.max_epochs=9", "optimizer.lr=-1"): "the optimizer rejects its settings",
}


@pytest.mark.parametrize("typed", REFUSALS)
def test_a_refusal_leaves_every_byte_and_time_of_the_run(
    typed: tuple[str, ...],
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = make(*PLAIN, "trainer.max_epochs=2")
    before = trace(run)
    assert run_train(monkeypatch, f"resume={run}", *typed) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert REFUSALS[typed] in error
    assert trace(run) == before


def test_so_does_a_refused_auto(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(*PLAIN, "trainer.max_epochs=2")
    before = trace(run)
    typed = [*PLAIN, "trainer.max_epochs=2", f"hydra.run.dir={run}", "resume=auto"]
    assert run_train(monkeypatch, *typed) == 1
    assert "has already finished" in capsys.readouterr().err
    assert trace(run) == before


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("batch_size=16", "in the middle of an epoch with batch_size 32, but this run has 16"),
        ("seed=5", "in the middle of an epoch with seed"),
        (
            "trainer.limit_train_batches=3",
            "in the middle of an epoch with trainer.limit_train_batches=4, but this run has 3",
        ),
        (
            "trainer.accumulate_grad_batches=2",
            "in the middle of an epoch with trainer.accumulate_grad_batches=1, but this run has 2",
        ),
    ],
)
def test_what_an_epoch_is_made_of_changes_between_two_only(
    typed: str,
    sentence: str,
    stopped: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = trace(stopped)
    assert run_train(monkeypatch, f"resume={stopped}", STOP, typed) == 1
    assert sentence in capsys.readouterr().err
    assert trace(stopped) == before


def test_a_run_limited_by_steps_does_not_end_its_last_epoch_twice(
    make: Make, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Early stopping and the best checkpoint would look for a score of it."""
    patient = "callbacks.early_stopping.patience=5"
    run = make(*PLAIN, patient, "trainer.max_steps=8")
    assert run_train(monkeypatch, f"resume={run}", "trainer.max_steps=16") == 0
    assert not [warning for warning in recwarn if "could not find" in str(warning.message)]
    whole = make(*PLAIN, patient, "trainer.max_steps=16")
    assert rows(run) == rows(whole)
    assert equal(last(run)["state_dict"], last(whole)["state_dict"])
    # So the next one can have another number of steps.
    typed = ["trainer.max_steps=22", "trainer.limit_train_batches=6", "batch_size=16"]
    assert run_train(monkeypatch, f"resume={run}", *typed) == 0
    assert [row["epoch"] for row in rows(run)[-6:]] == ["4"] * 6


def test_a_run_killed_after_its_last_step_comes_to_say_so(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(*PLAIN, "trainer.max_epochs=2")
    whole, content = summary(run), last(run)
    content["callbacks"]["Timer"]["time_elapsed"]["train"] = 1e6
    torch.save(content, run / "checkpoints/last.ckpt")
    (run / "summary.json").write_text(json.dumps({**whole, "state": "running", "steps": 0}))
    assert run_train(monkeypatch, f"resume={run}") == 0
    for key in ("state", "steps", "epochs", "best_bits_per_dim", "best_checkpoint"):
        assert summary(run)[key] == whole[key]
    assert summary(run)["seconds"] >= 1e6  # those of the checkpoint count


def test_an_interrupted_run_is_not_finished_by_a_limit_that_it_has_passed(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(*PLAIN, "trainer.max_epochs=2")
    (run / "summary.json").write_text(json.dumps({**summary(run), "state": "interrupted"}))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert run_train(monkeypatch, f"resume={run}", "trainer.max_steps=3") == 1
    error = capsys.readouterr().err
    assert "has already taken 8 steps (trainer.max_epochs=2, trainer.max_steps=3)" in error
    assert "for example trainer.max_steps=16." in error
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_averaged_weights_can_be_left_out_and_taken_in(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them the weights that were trained go on, not those of the average."""
    run = make(*PLAIN, "trainer.max_epochs=1", "callbacks.ema.decay=0.9")
    typed = ["trainer.max_epochs=2", "callbacks.ema.decay=null", "optimizer.lr=0"]
    before = last(run)
    assert not equal(before["state_dict"], before["current_model_state"])
    assert run_train(monkeypatch, f"resume={run}", *typed) == 0
    after = last(run)
    assert "current_model_state" not in after
    assert equal(after["state_dict"], before["current_model_state"])
    typed = ["trainer.max_epochs=3", "callbacks.ema.decay=0.9"]
    assert run_train(monkeypatch, f"resume={run}", *typed) == 0
    assert equal(last(run)["state_dict"], last(run)["current_model_state"])  # of a rate of 0


STOPPING = ["optimizer.lr=0", "trainer.max_epochs=20"]


def test_early_stopping_ends_a_run_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(*PLAIN, *STOPPING, "callbacks.early_stopping.patience=2")
    assert summary(run)["epochs"] == 3
    assert summary(run)["stopped_early"].startswith("Monitored metric val/bits_per_dim did not imp")
    before = trace(run)
    for typed in ([], ["trainer.max_epochs=30"], ["callbacks.early_stopping.patience=1"]):
        assert run_train(monkeypatch, f"resume={run}", *typed) == 1
        assert "was ended by early stopping (Monitored metric val/bits" in capsys.readouterr().err
        assert trace(run) == before
    patient = "callbacks.early_stopping.patience=4"
    assert run_train(monkeypatch, f"resume={run}", patient) == 0
    assert summary(run)["epochs"] == 5
    off = ["callbacks.early_stopping.patience=null", "trainer.max_epochs=6"]
    assert run_train(monkeypatch, f"resume={run}", *off) == 0
    assert (summary(run)["epochs"], summary(run)["stopped_early"]) == (6, None)


def test_time_that_is_spent_ends_a_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    limits = ["trainer.max_epochs=-1", "trainer.max_time=00:00:00:01"]
    assert run_train(monkeypatch, *PLAIN, *limits, f"hydra.run.dir={run}") == 0
    before = trace(run)
    assert run_train(monkeypatch, f"resume={run}") == 1
    assert "has already finished (trainer.max_time=00:00:00:01)" in capsys.readouterr().err
    assert trace(run) == before


def test_early_stopping_is_a_choice() -> None:
    assert compose("train").callbacks.early_stopping.patience is None
    assert compose("train", ["callbacks=early_stopping"]).callbacks.early_stopping.patience == 10


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        (
            "callbacks.early_stopping.monitor=val/nothing",
            "callbacks.early_stopping.monitor=val/nothing is not logged by this run; it logs "
            "train/bits_per_dim, val/bits_per_dim, ",
        ),
        ("callbacks.best.monitor=val/loss", "callbacks.best.monitor=val/loss is not logged by"),
        ("trainer.limit_val_batches=0", "callbacks.early_stopping.monitor=val/bits_per_dim is not"),
        ("callbacks.early_stopping.patience=0", "callbacks.early_stopping.patience=0"),
        (
            "trainer.max_epochs=0",
            "there is nothing to train with trainer.max_epochs=0, tra",
        ),
        ("trainer.limit_train_batches=0", "trainer.limit_train_batches=0"),
        (
            "trainer.val_check_interval=100",
            "trainer.val_check_interval=100 batches are more than the 4 of an epoch; give fewer",
        ),
    ],
)
def test_what_cannot_train_is_told_before_the_run_begins(
    typed: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    arguments = [*PLAIN, "callbacks.early_stopping.patience=2", typed, f"hydra.run.dir={run}"]
    assert run_train(monkeypatch, *arguments) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert sentence in error
    assert not run.exists()


@pytest.mark.parametrize("monitor", ["train/bits_per_dim", "lr-AdamW", "train/gradient_norm"])
def test_what_is_logged_can_be_monitored(
    monitor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = ["callbacks.early_stopping.patience=2", f"callbacks.early_stopping.monitor={monitor}"]
    typed += ["trainer.max_epochs=2", f"hydra.run.dir={tmp_path / 'run'}"]
    assert run_train(monkeypatch, *PLAIN, *typed) == 0


def test_a_try_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert run_train(monkeypatch, *TINY, "+trainer.fast_dev_run=true", f"hydra.run.dir={run}") == 0
    printed = capsys.readouterr().out
    assert (
        "tried 1 batch of training and of validation without an error; nothing is kept" in printed
    )
    assert "sample.py" not in printed
    assert not run.exists()


def test_a_run_that_diverged_goes_on_with_a_lower_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the program advises."""
    run = tmp_path / "run"
    typed = [*PLAIN, "optimizer.lr=1e30", "trainer.max_epochs=2", f"hydra.run.dir={run}"]
    assert run_train(monkeypatch, *typed) == 1
    error = capsys.readouterr().err
    assert f"to continue: python train.py resume={run} optimizer.lr=1e+29\n" in error
    assert f"and the last checkpoint is {run}/checkpoints/last.ckpt. Lower optimizer.lr" in error
    assert run_train(monkeypatch, f"resume={run}", "optimizer.lr=0.001") == 0
    assert summary(run)["best_bits_per_dim"] < 4.2


def test_one_batch_is_another_number_than_all_of_them(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = [text for text in PLAIN if "limit" not in text]
    run = make(*whole, "trainer.max_epochs=1", "trainer.limit_train_batches=1.0", "batch_size=512")
    typed = ["trainer.max_epochs=2", "trainer.limit_val_batches=1"]
    assert run_train(monkeypatch, f"resume={run}", *typed) == 0
    assert "trainer.limit_val_batches=1 (1.0 until now)" in capsys.readouterr().out
    assert last(run)["global_step"] == 4
    assert run_train(monkeypatch, f"resume={run}", "trainer.max_epochs=3", "model.dropout=0") == 0


def test_scores_of_other_images_are_not_compared(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(*PLAIN, "trainer.max_epochs=2")
    before = (run / "checkpoints/best.ckpt").read_bytes()
    # Weights that get worse would not be the best again.
    typed = ["trainer.max_epochs=3", "optimizer.lr=10", "trainer.limit_val_batches=2"]
    assert run_train(monkeypatch, f"resume={run}", *typed) == 0
    assert "is kept as best-before-step-8.ckpt" in capsys.readouterr().out
    assert (run / "checkpoints/best-before-step-8.ckpt").read_bytes() == before
    assert last(run, "best")["global_step"] == 12
    assert summary(run)["best_bits_per_dim"] == float(rows(run)[-1]["val/bits_per_dim"])


def test_so_are_those_of_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "other"):
        for i in range(20):
            write_image(tmp_path / name / f"{i}.png", (4, 6, 3), seed=i + 100 * (name == "other"))
    run = tmp_path / "run"
    options = [*PLAIN, "dataset=image_folder", "dataset.size=[4,6]", "batch_size=4"]
    options += [f"dataset.root={tmp_path / 'one'}", f"dataset.cache={tmp_path / 'cache'}"]
    assert run_train(monkeypatch, *options, "trainer.max_epochs=2", f"hydra.run.dir={run}") == 0
    typed = ["trainer.max_epochs=3", "optimizer.lr=10", f"dataset.root={tmp_path / 'other'}"]
    assert run_train(monkeypatch, f"resume={run}", *typed) == 0
    assert summary(run)["best_bits_per_dim"] == float(rows(run)[-1]["val/bits_per_dim"])
    assert len(list((run / "checkpoints").glob("best-before-step-*.ckpt"))) == 1


def test_a_run_that_validates_every_other_epoch_ends_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(*PLAIN, "trainer.max_epochs=2", "trainer.check_val_every_n_epoch=2")
    before = trace(run)
    assert run_train(monkeypatch, f"resume={run}") == 1
    error = capsys.readouterr().err
    assert "has already finished (trainer.max_epochs=2); raise the limit to train it" in error
    assert "for example trainer.max_epochs=4." in error
    assert trace(run) == before
    assert run_train(monkeypatch, f"resume={run}", "trainer.max_epochs=4") == 0
    assert last(run)["global_step"] == 16
