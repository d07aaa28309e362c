"""The command line: mistakes become one sentence, and leave nothing on disk."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

import imagegen
from imagegen.cli import entry as cli
from imagegen.cli.messages import sentence_for
from imagegen.cli.override_checks import check_overrides
from imagegen.core.errors import UserError

CONF = {
    "train.yaml": """
defaults: [_self_, dataset: digits, model: small, trainer: default, experiment: null,
           override hydra/job_logging: none, override hydra/hydra_logging: none,
           override hydra/help: short]
seed: 0
batch_size: 16
share: 0.5
switch: false
note: null
folder: ${project_root:}/data
place: ${hydra:runtime.output_dir}/place
hydra: {run: {dir: "${project_root:}/outputs/one"}, sweep: {dir: "${project_root:}/outputs/many"}}
""",
    "dataset/digits.yaml": "size: 8",
    "dataset/mnist.yaml": "size: 28",
    "dataset/image_folder.yaml": "root: ???\nsize: ???\nchannels: 3",
    "model/small.yaml": """
n_layers: 2
d_model: 32
attention: {_target_: imagegen.x.Y, chunk_size: 64}
""",
    "trainer/default.yaml": "_target_: collections.OrderedDict\nmax_epochs: 20",
    "experiment/deep.yaml": "# @package _global_\nmodel: {n_layers: 9}",
    "experiment/broken.yaml": "# @package _global_\nmodel: {n_layers: '${nowhere.n}'}",
    "hydra/help/short.yaml": "template: |-\n  HELP\n  $APP_CONFIG_GROUPS\n  $CONFIG",
    "other/thing.yaml": "x: 1",
}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    root = tmp_path / "project"
    for name, text in CONF.items():
        (root / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "conf" / name).write_text(text)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(cli, "PROJECT_ROOT", root)
    for name in ("IMAGEGEN_DEBUG", "HYDRA_FULL_ERROR", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    level = logging.root.level
    yield root
    logging.root.setLevel(level)
    assert not GlobalHydra.instance().is_initialized()
    assert list(elsewhere.iterdir()) == []


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def run(
        *argv: str, main: Callable[[DictConfig], Any] = lambda cfg: None, **options: Any
    ) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["train.py", *argv])
        status = 0
        try:
            cli.hydra_entry("train", **options)(main)()
        except SystemExit as stop:
            status = int(stop.code or 0)
        out, err = capfd.readouterr()
        return status, out, err

    return run


def test_runs_with_the_configuration(project: Path, run: Callable[..., Any]) -> None:
    seen = {}

    def main(cfg: DictConfig) -> None:
        seen.update(cfg, output=HydraConfig.get().runtime.output_dir)
        assert "HYDRA_FULL_ERROR" not in os.environ

    assert run("dataset=mnist", "model.n_layers=4", "share=1", main=main) == (0, "", "")
    assert seen["dataset"] == {"size": 28}
    assert seen["model"].n_layers == 4
    assert seen["folder"] == f"{project}/data"
    assert seen["output"] == f"{project}/outputs/one"
    assert "HYDRA_FULL_ERROR" not in os.environ


def test_called_with_a_configuration() -> None:
    entry = cli.hydra_entry("train")(lambda cfg: cfg.seed + 1)
    assert entry(cli.compose("train", ["seed=4"])) == 5


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("model.n_layer=4", r"'model\.n_layer'; did you mean model\.n_layers\?"),
        ("n_layers=4", r"'n_layers'; did you mean model\.n_layers\?"),
        ("model.chunk_size=4", r"did you mean model\.attention\.chunk_size\?"),
        ("model.zzz=4", "model has n_layers, d_model, attention"),
        ("zzz=4", "there is no option 'zzz'; --help"),
        ("trainer.zzz=4", r"\(\+trainer\.zzz=4 passes one"),
        ("hydra.run.dri=x", r"did you mean hydra\.run\.dir\?"),
        ("dataset=mnsit", "dataset has no choice 'mnsit'; did you mean mnist"),
        ("dataset=zzz", "choose one of digits, image_folder, mnist"),
        ("datset=mnist", r"'datset'; did you mean dataset\?"),
        ("other=thing", "other is not an option of train"),
        ("n_layers", r"'n_layers' is not of the form key=value; did you mean model\.n_layers="),
        ("zzz", "'zzz' is not of the form key=value"),
        ("note=a(b", "'note=a\\(b' cannot be read"),
        ("model.n_layers=many", "must be a whole number, such as its default 2"),
        ("model.n_layers=2.5", "must be a whole number"),
        ("model.n_layers=", r"model\.n_layers is empty, but"),
        ("batch_size=true", "must be a whole number"),
        ("share=half", "share is half, but it must be a number"),
        ("switch=3", "must be true or false"),
        ("model.attention=linear", "model.attention is a section; set one of model.attention"),
        ("dataset=mnist,digits", "add --multirun"),
        ("seed=1,2", "add --multirun"),
        ("seed=range(3)", "add --multirun"),
        (
            "hydra.sweep.dir=x",
            r"counts only in a sweep; add --multirun, or name .* run with hydra\.run\.dir=x\.",
        ),
        ("hydra.sweep.subdir=x", r"'hydra\.sweep\.subdir=x' counts only .*, or leave it out\."),
        ("hydra.sweeper.max_batch_size=2", r"counts only in a sweep; add --multirun"),
        ("hydra/launcher=basic", r"'hydra/launcher=basic' counts only in a sweep"),
        ("dataset=image_folder", r"dataset\.root and dataset\.size are not set; add"),
        ("experiment=broken", "nowhere"),
        ("experiment=brokn", "did you mean broken"),
        ("model=null", "model has no choice 'null'; choose one of small"),
        ("model=[]", r"model has no choice '\[\]'; choose one of small"),
        ("model=[small,null]", "model has no choice 'null'"),
        ("experiment=null", "experiment has no choice 'null'; choose one of broken, deep"),
        ("~trainer", "trainer cannot be left out; choose one of default"),
        ("--n_layers=4", "'--n_layers=4' is not understood"),
        ("--cfg", "argument --cfg/-c: expected one argument; --hydra-help lists"),
        ("--resolve", "--resolve flag can only be used in conjunction with --cfg"),
        ("--run --multirun", "Only one of --run, --multirun, "),
        ("--cfg nonsense", "invalid choice: 'nonsense'"),
        ("+seed=3", "seed"),
        ("~zzz", "zzz"),
    ],
)
def test_mistakes(project: Path, run: Callable[..., Any], argv: str, sentence: str) -> None:
    def main(cfg: DictConfig) -> None:
        pytest.fail("must not run")

    status, out, err = run(*argv.split(), main=main)
    assert (status, out) == (1, "")
    assert re.fullmatch(rf"error: .*{sentence}.*\n", err), err
    assert not (project / "outputs").exists()


@pytest.mark.parametrize(
    "argv",
    [
        "dataset=mnist,digits,mnsit -m",
        "dataset=image_folder,digits -m",
        "seed=1,2 model.n_layer=3 --multirun",
        "seed=1,2 hydra.run.dir=x -m",
        "seed=1,2 hydra.run.dir=x hydra.mode=MULTIRUN",
    ],
)
def test_mistakes_in_a_multirun(project: Path, run: Callable[..., Any], argv: str) -> None:
    status, _, err = run(*argv.split())
    assert status == 1
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert not (project / "outputs").exists()


@pytest.mark.parametrize(
    "argv",
    [
        ["dataset.size=[24,40]"],
        ["share=[0.1,0.2]"],
        ["seed=null"],
        ["batch_size=${seed}"],
        ["+trainer.extra=1"],
        ["++seed=3"],
        ["~switch"],
        ["experiment=deep", "model.n_layers=3"],
        ["trainer.max_epochs=many"],  # collections.OrderedDict tells nothing about it
        ["note='a, b=c'"],
        ["hydra.run.dir=${project_root:}/outputs/two"],
        ["place=elsewhere"],  # its default is known only when the run has begun
        ["~experiment"],
    ],
)
def test_accepted(run: Callable[..., Any], argv: list[str]) -> None:
    assert run(*argv) == (0, "", "")


@pytest.mark.parametrize(
    "argv",
    [
        ["seed=3", "dataset=mnist", "hydra.run.dir=place", "++dataset.size=7", "experiment=deep"],
        ["~experiment", "+trainer.extra={a: [1]}", "note='a, b=c'", "~switch", "place=${seed}"],
        ["seed=3", "hydra.job.env_copy=[HOME]", "hydra.job.config.override_dirname.kv_sep=_"],
    ],
)
def test_what_is_composed_is_what_hydra_composes(argv: list[str]) -> None:
    with cli._hydra_ready():
        (config,) = check_overrides("train", argv, multirun=False)
        expected = hydra.compose("train", argv, return_hydra_config=True)
    assert OmegaConf.to_yaml(config) == OmegaConf.to_yaml(expected)
    for node, like in ((config, expected), (config.hydra, expected.hydra)):
        assert (OmegaConf.is_struct(node), OmegaConf.is_readonly(node)) == (
            OmegaConf.is_struct(like),
            OmegaConf.is_readonly(like),
        )


def test_what_is_no_text_is_refused(project: Path, run: Callable[..., Any]) -> None:
    status, out, err = run("note=caf\udce9")
    assert (status, out) == (1, "")
    assert err == (
        "error: 'note=caf\\\\udce9' is not valid UTF-8; rename the file or folder that it names.\n"
    )
    assert not (project / "outputs").exists()


def test_what_a_terminal_cannot_show_is_escaped(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "ascii"))
    assert run(main=lambda cfg: print("± 1"))[0] == 0
    sys.stdout.flush()
    assert shown.getvalue() == b"\\xb1 1\n"


def test_user_error_is_a_sentence(run: Callable[..., Any]) -> None:
    def main(cfg: DictConfig) -> None:
        raise UserError("the folder x is empty.")

    assert run(main=main) == (1, "", "error: the folder x is empty.\n")


def test_bug_keeps_its_traceback(run: Callable[..., Any]) -> None:
    def main(cfg: DictConfig) -> None:
        raise ZeroDivisionError("a bug")

    status, _, err = run(main=main)
    assert status == 1
    assert err.startswith("Traceback")
    assert err.endswith("ZeroDivisionError: a bug\n")
    assert "run_and_report" not in err


@pytest.mark.parametrize("name", ["IMAGEGEN_DEBUG", "HYDRA_FULL_ERROR"])
def test_debugging_shows_all(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")

    def main(cfg: DictConfig) -> None:
        raise UserError("deep down")

    with pytest.raises(UserError, match="deep down"):
        run(main=main)
    with pytest.raises(UserError, match="n_layers"):
        run("model.n_layer=3")


@pytest.mark.parametrize("by_lightning", [False, True])
def test_interrupt(run: Callable[..., Any], by_lightning: bool) -> None:
    def main(cfg: DictConfig) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            if by_lightning:
                sys.exit(1)
            raise

    assert run(main=main) == (130, "", "\ninterrupted\n")


def test_an_interrupt_that_became_another_error(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in OmegaConf, where one falls between a change and its undoing."""

    def compose(*args: Any, **options: Any) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise AttributeError("a flag") from None

    monkeypatch.setattr("imagegen.cli.override_checks.compose", compose)
    assert run() == (130, "", "\ninterrupted\n")


def test_exit_status_of_main(run: Callable[..., Any]) -> None:
    assert run(main=lambda cfg: sys.exit(3))[0] == 3


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk(project: Path, run: Callable[..., Any]) -> None:
    def main(cfg: DictConfig) -> None:
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")

    expected = f"error: cannot write below {project}/outputs/one: no space left on device.\n"
    assert run(main=main) == (1, "", expected)


def test_unwritable_run_folder(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, reason in (
        (tmp_path / "file" / "run", "not a directory"),
        ("/proc/run", "no such"),
    ):
        status, out, err = run(f"hydra.run.dir={folder}")
        assert (status, out, err.count("\n")) == (1, "", 1)
        assert err.startswith(f"error: cannot write {folder}: {reason}")


def test_the_folder_of_one_run_in_a_multirun(project: Path, run: Callable[..., Any]) -> None:
    for typed in (["hydra.run.dir=x", "--multirun"], ["hydra.mode=MULTIRUN", "hydra.run.dir=x"]):
        _, _, err = run("seed=1,2", *typed)
        assert "'hydra.run.dir=x' names the folder of a single run" in err
        assert "runs with hydra.sweep.dir=x, and those in it" in err
        assert "with hydra.sweep.subdir." in err


def test_failed_job_fails_the_multirun(project: Path, run: Callable[..., Any]) -> None:
    seen = []

    def main(cfg: DictConfig) -> None:
        seen.append(cfg.seed)
        if cfg.seed == 1:
            raise UserError("seed 1 is bad.")

    status, _, err = run("--multirun", "seed=0,1,2", main=main)
    assert status == 1
    assert seen == [0, 1, 2]
    assert err.count("seed 1 is bad.") == 1
    assert err.startswith("error in the run with seed=1: seed 1 is bad.\n")
    assert run("--multirun", "seed=0,2", main=main)[0] == 0


def test_hydra_features(project: Path, run: Callable[..., Any]) -> None:
    status, out, _ = run("--cfg", "job", "dataset=mnist")
    assert status == 0
    assert "size: 28" in out
    status, out, _ = run("--help")
    assert (status, out[:5]) == (0, "HELP\n")
    assert "dataset: digits, image_folder, mnist" in out
    assert run("--info", "searchpath")[0] == 0
    assert run("--cfg", "job", "dataset=image_folder")[0] == 0
    assert run("--cfg", "job", "model.n_layer=3")[0] == 1
    assert not (project / "outputs").exists()


@pytest.fixture
def presets(tmp_path: Path) -> Path:
    """A user's own choices, in a group that there is and in one that there is not."""
    for name, text in {
        "experiment/mine": "# @package _global_\ndefaults: [override /model: large]\nseed: 5",
        "model/large": "n_layers: 99\nd_model: 64",
        "extra/thing": "x: 1",
    }.items():
        path = tmp_path / "presets" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "presets"


@pytest.mark.parametrize(
    "typed",
    [
        ["--config-dir", "../presets"],
        ["--config-dir={folder}"],
        ["hydra.searchpath=[file://{folder}]"],
    ],
)
def test_own_presets(run: Callable[..., Any], presets: Path, typed: list[str]) -> None:
    seen: list[DictConfig] = []
    typed = [text.format(folder=presets) for text in typed]
    choices = ["experiment=mine", "+extra=thing", "dataset=mnist", "model.d_model=3"]
    assert run(*typed, *choices, main=seen.append) == (0, "", "")
    assert run("--multirun", *typed, "model=large,small", main=seen.append) == (0, "", "")
    assert [cfg.seed for cfg in seen] == [5, 0, 0]
    assert seen[0].model == {"n_layers": 99, "d_model": 3}
    assert [cfg.model.n_layers for cfg in seen] == [99, 99, 2]
    assert seen[0].extra == {"x": 1}


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("experiment=mien", "experiment has no choice 'mien'; did you mean mine"),
        ("model=lrge", "model has no choice 'lrge'; did you mean large"),
        ("model=large model.n_layer=4", r"'model\.n_layer'; did you mean model\.n_layers"),
        ("model=large model.n_layers=many", "must be a whole number, such as its default 99"),
        ("+extra=thnig", "extra has no choice 'thnig'; did you mean thing"),
        ("zzz=4", "there is no option 'zzz'"),
        ("dataset=image_folder", r"dataset\.root and dataset\.size are not set"),
    ],
)
def test_mistakes_beside_own_presets(
    project: Path, run: Callable[..., Any], presets: Path, argv: str, sentence: str
) -> None:
    for typed in (["--config-dir", str(presets)], [f"hydra.searchpath=[file://{presets}]"]):
        status, out, err = run(*argv.split(), *typed)
        assert (status, out) == (1, "")
        assert re.fullmatch(rf"error: .*{sentence}.*\n", err), err
        assert not (project / "outputs").exists()


def test_a_resumed_run_needs_its_presets(project: Path, run: Callable[..., Any]) -> None:
    status, out, err = run("experiment=mine", "resume=x")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("error: experiment has no choice 'mine'; choose one of broken, deep. ")
    assert err.endswith("found with the --config-dir of the first start.\n")


def test_a_missing_folder_of_presets(project: Path, run: Callable[..., Any]) -> None:
    expected = "error: --config-dir nowhere: there is no such folder.\n"
    assert run("--config-dir", "nowhere") == (1, "", expected)
    assert not (project / "outputs").exists()


def test_check_comes_before_the_run_folder(project: Path, run: Callable[..., Any]) -> None:
    def check(cfg: DictConfig, folder: Path) -> None:
        assert folder == project / "outputs" / "one"
        if cfg.seed == 3:
            raise UserError("no.")

    assert run("seed=3", check=check) == (1, "", "error: no.\n")
    assert not (project / "outputs").exists()
    assert run("seed=4", check=check)[0] == 0
    assert run("seed=3", "--cfg", "job", check=check)[0] == 0


def test_rewrite(run: Callable[..., Any]) -> None:
    seen = []

    def main(cfg: DictConfig) -> None:
        seen.append(cfg.seed)

    assert run(main=main, rewrite=lambda argv: [*argv, "seed=7"])[0] == 0
    assert seen == [7]
    assert sys.argv == ["train.py", "seed=7"]


def test_options_that_a_class_refuses(run: Callable[..., Any]) -> None:
    def main(cfg: DictConfig) -> None:
        from hydra.utils import instantiate

        instantiate({"opt": {"_target_": "datetime.timedelta", "dayz": 3}})

    status, _, err = run(main=main)
    assert status == 1
    assert re.fullmatch(r"error: opt is refused: .*dayz.*IMAGEGEN_DEBUG=1 shows where\)\.\n", err)


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("nowhere.Nothing", "opt is refused: Error locating target 'nowhere.Nothing'."),
        ("[]", "opt is refused: Expected a callable target, got '[]' of type 'ListConfig'."),
        ("urllib.request.urlopen", "opt is refused: x .IMAGEGEN_DEBUG=1 shows where.."),
    ],
)
def test_targets_that_cannot_be_called(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, target: str, sentence: str
) -> None:
    def fail() -> None:
        raise LookupError("x")

    def main(cfg: DictConfig) -> None:
        from hydra.utils import instantiate

        instantiate({"opt": {"_target_": [] if target == "[]" else target}})

    monkeypatch.setattr("urllib.request.urlopen", fail)
    status, _, err = run(main=main)
    assert status == 1
    assert re.fullmatch(f"error: {re.escape(sentence) if '[' in sentence else sentence}\n", err)


def test_causes_are_found() -> None:
    from hydra.errors import InstantiationException

    misconfiguration = type("MisconfigurationException", (Exception,), {})
    outer = InstantiationException("Error in call to target")
    outer.__cause__ = misconfiguration("No supported gpu backend found!")
    assert "trainer=cpu" in str(sentence_for(outer))
    outer.__cause__ = UserError("fix it.")
    assert sentence_for(outer) == "fix it."
    outer.__cause__ = KeyError("a bug")
    assert sentence_for(outer) is None
    assert sentence_for(PermissionError(13, "Permission denied", "x")) == (
        "cannot use x: permission denied."
    )
    assert sentence_for(FileNotFoundError(2, "no such file", "x")) is None
    assert "full" in str(sentence_for(RuntimeError("PytorchStreamWriter failed writing file")))


def test_nothing_heavy_is_imported(project: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from imagegen.cli import entry as cli
from imagegen.cli import resume
from imagegen.training.run_folder import refuse_used_folder
cli.PROJECT_ROOT = Path({str(project)!r})
entry = cli.hydra_entry("train", rewrite=resume.rewrite_resume, check=refuse_used_folder)
try:
    entry(lambda cfg: None)()
finally:
    heavy = {{"torch", "pytorch_lightning", "wandb", "sklearn", "torchvision"}} & set(sys.modules)
    assert not heavy, heavy
"""
    command = [sys.executable, "-c", program, "--help"]
    env = {**os.environ, "PYTHONPATH": str(Path(imagegen.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("HELP\n")
