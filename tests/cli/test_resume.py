"""`resume=` recalls what a run was started with."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from imagegen.cli import resume
from imagegen.cli.resume import rewrite_resume
from imagegen.core.errors import UserError
from imagegen.core.override_syntax import quote
from imagegen.training.run_folder import claim_run_folder, refuse_used_folder


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder with outputs; a checkpoint there is its list of overrides, as text."""
    root = tmp_path / "project"
    root.mkdir()
    monkeypatch.setattr(resume, "PROJECT_ROOT", root)
    checkpoints = ModuleType("imagegen.checkpoint.reading")
    checkpoints.read_metadata = lambda path: {"overrides": path.read_text().splitlines()}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "imagegen.checkpoint.reading", checkpoints)
    return root


def make_run(folder: Path, overrides: list[str], age: int = 0) -> Path:
    checkpoint = folder / "checkpoints" / "last.ckpt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_text("\n".join(overrides))
    os.utime(checkpoint, (1e9 - age, 1e9 - age))
    return checkpoint


def meaning(argv: list[str]) -> dict[str, object]:
    """Options and values of overrides as Hydra reads them; flags are left out."""
    parser = OverridesParser.create()
    parsed = [parser.parse_override(text) for text in argv if "=" in text]
    return {str(p.key_or_group): p.value() for p in parsed}


def test_nothing_to_do(project: Path) -> None:
    for argv in ([], ["dataset=mnist", "--cfg", "job"], ["resume=null"], ["oops"]):
        assert rewrite_resume(argv) == argv


def test_latest_recalls_the_newest_run(project: Path) -> None:
    make_run(project / "outputs" / "day" / "1", ["dataset=mnist"], age=50)
    newest = make_run(project / "outputs" / "day" / "sweep" / "2", ["dataset=cifar10", "seed=3"])
    assert meaning(rewrite_resume(["resume=latest"])) == {
        "dataset": "cifar10",
        "seed": 3,
        "resume": str(newest),
        "hydra.run.dir": str(newest.parents[1]),
    }


@pytest.mark.parametrize("what", ["run", "run/checkpoints", "run/checkpoints/last.ckpt"])
def test_folder_and_file(project: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_run(project / "run", ["seed=3"])
    monkeypatch.chdir(project)
    assert meaning(rewrite_resume([f"resume={what}"])) == {
        "seed": 3,
        "resume": str(checkpoint),
        "hydra.run.dir": str(project / "run"),
    }


def test_what_is_typed_now_wins(project: Path) -> None:
    make_run(
        project / "run",
        ["dataset=mnist", "trainer.max_epochs=10", "+trainer.x=1", "+trainer.y=1", "resume=old"],
    )
    argv = ["-c", "job", "trainer.max_epochs=40", f"resume={project / 'run'}", "trainer.x=2"]
    new = rewrite_resume([*argv, "+trainer.y=2"])
    assert new[:4] == ["-c", "job", "dataset=mnist", "+trainer.x=1"]
    assert new[6:] == ["trainer.max_epochs=40", "trainer.x=2", "+trainer.y=2"]
    assert rewrite_resume(new)[:2] == ["-c", "job"]
    assert meaning(rewrite_resume(new)) == meaning(new)


def test_groups_are_replaced_not_doubled(project: Path) -> None:
    make_run(project / "run", ["dataset=mnist", "experiment=mnist_cpu"])
    new = rewrite_resume([f"resume={project / 'run'}", "dataset=digits", "~experiment"])
    assert [text for text in new if text.startswith(("dataset", "experiment"))] == [
        "dataset=digits"
    ]


def test_run_folder_typed_is_respected(project: Path) -> None:
    make_run(project / "run", [])
    new = rewrite_resume([f"resume={project / 'run'}", "hydra.run.dir=elsewhere"])
    assert meaning(new)["hydra.run.dir"] == "elsewhere"


def test_lone_checkpoint_gets_a_fresh_folder(project: Path) -> None:
    (project / "copy.ckpt").write_text("seed=3")
    new = rewrite_resume([f"resume={project / 'copy.ckpt'}"])
    assert meaning(new) == {"seed": 3, "resume": str(project / "copy.ckpt")}


@pytest.mark.parametrize("name", ["a b", "a=b", "a,b", "it's", "[x]", "{y}", "ü", "$z", "${w}"])
def test_odd_paths(project: Path, name: str) -> None:
    checkpoint = make_run(project / name, [])
    new = rewrite_resume([f"resume={quote(str(project / name))}"])
    values = OmegaConf.create(meaning(new))
    assert values["resume"] == str(checkpoint)
    assert values["hydra.run.dir"] == str(project / name)


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc"])))
def test_quote_round_trip(text: str) -> None:
    value = OverridesParser.create().parse_override(f"key={quote('/' + text)}").value()
    if "${" not in text:
        assert value == "/" + text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["resume=latest"], "outputs"),
        (["resume=missing"], "missing does not exist"),
        (["resume="], "empty"),
        (["resume=empty"], r"holds no checkpoints/last\.ckpt"),
        (["resume=run", "-m"], "--multirun"),
        (["resume=run", "hydra.mode=MULTIRUN"], "--multirun"),
        (["resume=run,other"], "--multirun"),
    ],
)
def test_refused(
    project: Path, argv: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    (project / "empty").mkdir()
    make_run(project / "run", [])
    with pytest.raises(UserError, match=message):
        rewrite_resume(argv)


@pytest.mark.parametrize("name", ["summary.json", "metrics.csv", "checkpoints/last.ckpt"])
def test_used_folder(tmp_path: Path, name: str) -> None:
    refuse_used_folder({"resume": None}, tmp_path / "new")
    refuse_used_folder({"resume": None}, tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    with pytest.raises(UserError, match=r"hydra\.run\.dir.*resume="):
        refuse_used_folder({"resume": None}, tmp_path)
    refuse_used_folder({"resume": "latest"}, tmp_path)
    with pytest.raises(UserError), claim_run_folder(tmp_path, resuming=False):
        pytest.fail("must not start")


def test_one_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fcntl")
    with claim_run_folder(tmp_path, resuming=False):
        with pytest.raises(UserError, match="another run"):
            with claim_run_folder(tmp_path, resuming=True):
                pytest.fail("must not start")
        monkeypatch.setenv("LOCAL_RANK", "1")
        with claim_run_folder(tmp_path, resuming=False):
            pass
        monkeypatch.delenv("LOCAL_RANK")
    with claim_run_folder(tmp_path, resuming=True):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_run_has_just_removed(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    with pytest.raises(UserError, match="has just removed"):
        with claim_run_folder(tmp_path / "gone", resuming=False):
            pytest.fail("must not start")


@pytest.mark.parametrize(
    "text",
    [
        "optimizer._target_=os.system",
        "+callbacks.x._target_=subprocess.run",
        "+callbacks.x={_target_: os.system, command: ls}",
        "+callbacks.x._target_=imagegen.cli.entry.os.system",
        "optimizer._target_=torch.optim.sgd.torch.load",
        "optimizer._target_=torch.load",
        "trainer._target_=pytorch_lightning.Trainer",
        "hydra.job.env_set.PATH=x",
        "+hydra.callbacks.x._target_=os.system",
        "hydra/launcher=joblib",
    ],
)
def test_code_from_elsewhere_has_to_be_typed(project: Path, text: str) -> None:
    checkpoint = make_run(project / "run", ["seed=3", text])
    with pytest.raises(UserError, match="which may run any code; if you trust it, type it again"):
        rewrite_resume([f"resume={checkpoint}"])
    if "hydra" not in text:
        rewritten = rewrite_resume([text, f"resume={checkpoint}"])
        assert rewritten.count(text) == 1
        assert "seed=3" in rewritten


@pytest.mark.parametrize(
    "text",
    [
        "optimizer._target_=torch.optim.SGD",
        "+callbacks.stop._target_=pytorch_lightning.callbacks.EarlyStopping",
        "head._target_=imagegen.heads.categorical.Categorical",
        "model.n_layers=3",
    ],
)
def test_usual_choices_are_recalled(project: Path, text: str) -> None:
    checkpoint = make_run(project / "run", [text])
    assert text in rewrite_resume([f"resume={checkpoint}"])
