"""The installed program, without the clone: what the wheel holds, and `imagegen COMMAND`."""

from __future__ import annotations

import json
import logging
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

import imagegen
import imagegen.commands.benchmark.command as benchmark
from imagegen.checkpoint import provenance
from imagegen.cli import entry as cli
from imagegen.commands import registry as commands
from imagegen.core import installation
from tests.helpers import SMALL, run_main, run_train

ROOT = Path(__file__).resolve().parent.parent
TINY = [*SMALL, "trainer.precision=32-true", "trainer.max_epochs=1"]
PRESET = """# @package _global_
defaults: [override /model: small]
seed: 7
"""
MODEL = "defaults: [default, _self_]\nn_layers: 1\nd_model: 24\nn_heads: 2\nd_ff: 16\n"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built of a copy without network."""
    if find_spec("pip") is None or find_spec("setuptools") is None:
        pytest.skip("needs pip and setuptools in this environment")
    if int(metadata.version("setuptools").partition(".")[0]) < 77:
        pytest.skip("needs setuptools 77, which pyproject.toml asks for")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("imagegen", "conf"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    _pip("wheel", "--no-build-isolation", "--wheel-dir", str(out), str(source))
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which pip has installed the wheel, with bin/imagegen."""
    target = tmp_path_factory.mktemp("site")
    _pip("install", "--no-compile", "--target", str(target), str(wheel))
    return target


def _pip(command: str, *arguments: str) -> None:
    quiet = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", command, *quiet, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def python(site: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python with the installed package, in a folder that is not a clone."""
    folder = tmp_path / "somewhere"
    folder.mkdir()
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "PYTHONPATH": str(site),
        "PATH": f"{site / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "COLUMNS": "120",
    }

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )

    return python


def _presets(folder: Path) -> str:
    """A folder of a user's own presets."""
    for name, text in (("experiment/mine", PRESET), ("model/small", MODEL)):
        path = folder / "presets" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return "presets"


def test_the_wheel_holds_the_package_and_the_configuration(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        scripts = archive.read(entry_points).decode()
    held = {name for name in names if ".dist-info/" not in name}
    code = {path.relative_to(ROOT) for path in (ROOT / "imagegen").rglob("*.py")}
    yamls = {Path("imagegen") / path.relative_to(ROOT) for path in (ROOT / "conf").rglob("*.yaml")}
    page = Path("imagegen", "commands", "page")
    others = {Path("imagegen", "py.typed"), page / "canvas.js", page / "look.js"}
    assert held == {str(path) for path in code | yamls | others}
    assert len(yamls) > 40
    assert "imagegen = imagegen.commands.registry:main" in scripts


def test_train_sample_complete_evaluate(
    site: Path, python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Everything goes below the working directory, nothing into the installed package."""
    folder, before = tmp_path / "somewhere", set(site.rglob("*"))
    overrides = [text for text in TINY if not text.startswith("model.")]
    typed = ["--config-dir", _presets(folder), "experiment=mine", *overrides]
    trained = python(str(site / "bin" / "imagegen"), "train", *typed)
    assert trained.returncode == 0, trained.stderr
    (summary,) = folder.glob("outputs/*/*/summary.json")
    run = summary.parent
    # The log is there if a library had something to say.
    assert {path.name for path in run.iterdir()} - {"train.log"} == {
        *(".hydra", "checkpoints", "config.yaml", "summary.json", "metrics.csv")
    }
    assert "d_model: 24" in (run / "config.yaml").read_text()
    here = run.relative_to(folder)
    assert f"  imagegen sample ckpt={here} n=64\n" in trained.stdout
    assert f"  imagegen evaluate ckpt={here} split=test\n" in trained.stdout

    # In one process, since importing PyTorch takes most of the time.
    rest = [
        ["sample", f"ckpt={here}", "n=2", "out=drawn"],
        ["sample", f"ckpt={here}", "task=complete", "n=1", "completions=2", "out=completed"],
        ["evaluate", f"ckpt={here}", "limit=8", "out=test.json"],
        ["runs", "--json"],
    ]
    program = f"""
import sys
from imagegen.commands import registry as commands
from imagegen.core import installation
from imagegen.checkpoint import provenance
for typed in {rest!r}:
    sys.argv = ["imagegen", *typed]
    assert commands.main() == 0, typed
from imagegen.commands.benchmark.contestants import choose_mechanisms
from imagegen.data.base import data_folder
from imagegen.cli.resume import rewrite_resume
assert choose_mechanisms(["linear"])[0].config["_target_"].endswith("LinearAttention")
print(data_folder(), *rewrite_resume(["resume=latest"]), provenance.commit(), sep="\\n")
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    *_, commit = printed = done.stdout.splitlines()
    assert str(folder / "data") in printed
    assert f"resume='{run / 'checkpoints' / 'last.ckpt'}'" in printed
    assert commit == "None"
    assert len(list(folder.glob("drawn/images/*.png"))) == 2
    assert (folder / "completed" / "images" / "00000-2.png").exists()
    assert json.loads((folder / "test.json").read_text())["images"] == 8
    assert {path for path in site.rglob("*") if "__pycache__" not in path.parts} == before


def test_a_mistake_is_one_sentence(
    python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = python("-m", "imagegen", "train", "dataset=mnsit")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(
        r"error: dataset has no choice 'mnsit'; did you mean mnist.*\n", done.stderr
    )
    assert list((tmp_path / "somewhere").iterdir()) == []


def test_an_incomplete_installation_is_named(
    wheel: Path, python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        code = [name for name in archive.namelist() if not name.startswith("imagegen/conf/")]
        archive.extractall(tmp_path / "part", code)
    place = str(tmp_path / "part")
    program = f"import sys; sys.path.insert(0, {place!r}); import imagegen.commands.train\n"
    done = python("-c", f"{program}imagegen.commands.train.main()")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: the folder {tmp_path / 'part' / 'conf'} is missing")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_several_processes_and_jobs(
    site: Path, python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """The further processes find the code and the user's presets, from another folder as well."""
    folder, imagegen = tmp_path / "somewhere", str(site / "bin" / "imagegen")
    overrides = [text for text in TINY if not text.startswith(("model.", "trainer=", "seed="))]
    typed = ["--multirun", "--config-dir", _presets(folder), "experiment=mine", *overrides]
    two = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "hydra.job.chdir=true"]
    done = python(imagegen, "train", *typed, *two, "seed=3,4", "hydra.sweep.dir=two")
    assert done.returncode == 0, done.stderr
    assert len(list(folder.glob("two/*/checkpoints/last.ckpt"))) == 2
    assert "this table again: imagegen runs two" in done.stdout
    if find_spec("hydra_plugins.hydra_joblib_launcher") is None:
        pytest.skip("needs the extra joblib")
    done = python(
        imagegen, "train", *typed, "sweep=joblib", "trainer=cpu", "seed=3,4", "hydra.sweep.dir=jobs"
    )
    assert done.returncode == 0, done.stderr
    states = [json.loads(path.read_text())["state"] for path in folder.glob("jobs/*/summary.json")]
    assert states == ["finished", "finished"]


@pytest.mark.slow
def test_its_types_are_seen(
    site: Path, python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    program = tmp_path / "somewhere" / "program.py"
    program.write_text(
        "from imagegen import Controls, complete, generate, load_checkpoint\n"
        'model = load_checkpoint("run").model\n'
        "reveal_type(next(generate(model, 2, controls=Controls(temperature=0.5))))\n"
        'generate(model, "two")\n'
        "from imagegen import nothing\n"
    )
    done = python("-m", "mypy", "--follow-imports=silent", program.name)
    assert "ndarray" in done.stdout
    assert 'Argument 2 to "generate" has incompatible type "str"' in done.stdout
    assert 'Module "imagegen" has no attribute "nothing"' in done.stdout
    assert "Found 2 errors" in done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("install", ["train -sc", "-sc", "benchmark generate -sc"])
def test_bash_completes(site: Path, tmp_path: Path, install: str) -> None:
    wanted = {
        "imagegen tr": "train",
        "imagegen benchmark ge": "generate",
        "imagegen train dataset=mn": "dataset=mnist",
        "imagegen train seed=1 model.n_l": "model.n_layers=",
        "imagegen sample temp": "temperature=",
        "imagegen find-lr optimizer=m": "optimizer=muon",
        "imagegen benchmark generate thr": "threads=",
        "imagegen runs ou": "",
        "imagegen nothing ou": "",
    }
    # All for one way to install the script, which is the same for each.
    lines = list(wanted) if install == "-sc" else ["imagegen train dataset=mn"]
    script = [f'eval "$(imagegen {install} install=bash)"', "complete -p imagegen"]
    for line in lines:
        script += [f"COMP_LINE='{line}' COMP_POINT={len(line)} COMP_CWORD={len(line.split()) - 1}"]
        script += ["COMPREPLY=()", "hydra_bash_completion", 'echo "${COMPREPLY[*]}"']
    path = f"{site / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site), "PATH": path},
        capture_output=True,
        text=True,
    )
    registered, *found = done.stdout.splitlines()
    assert (registered.split()[-1], done.stderr) == ("imagegen", "")
    assert found == [wanted[line] for line in lines]


def test_help_lists_every_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for typed in (["--help"], ["-h"], []):
        assert run_main(monkeypatch, commands.main, "imagegen", *typed) == 0
        lines = capsys.readouterr().out.splitlines()
        for name, command in commands.COMMANDS.items():
            assert [
                line.split(maxsplit=1)[1] for line in lines if line.startswith(f"  {name} ")
            ] == [command.what]
    assert run_main(monkeypatch, commands.main, "imagegen", "--version") == 0
    assert capsys.readouterr().out == f"imagegen {imagegen.__version__}\n"


def test_an_unknown_command_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["imagegen", "trian", "seed=1"])
    assert commands.main() == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"error: there is no command 'trian'; did you mean train\? .*\n", err)


@pytest.mark.parametrize("name", [*commands.COMMANDS, *benchmark.COMMANDS])
def test_every_command_has_its_own_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    words = ["benchmark", name] if name in benchmark.COMMANDS and name != "train" else [name]
    monkeypatch.setattr(sys, "argv", ["imagegen", *words, "--help"])
    try:
        status = commands.main()
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status == 0
    assert f"imagegen {' '.join(words)}" in capsys.readouterr().out


def test_a_run_is_the_same_however_it_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("script", "command"):
        typed = [*TINY, f"hydra.run.dir={tmp_path / name}"]
        if name == "script":
            assert run_train(monkeypatch, *typed) == 0
        else:
            assert run_main(monkeypatch, commands.main, "imagegen", "train", *typed) == 0
    files = [
        {str(path.relative_to(tmp_path / name)) for path in (tmp_path / name).rglob("*")}
        for name in ("script", "command")
    ]
    assert files[0] == files[1]
    assert ".hydra/config.yaml" in files[0]
    # Refused when Hydra has written already.
    refused = tmp_path / "refused"
    typed = [*TINY, "seed=-1", f"hydra.run.dir={refused}"]
    assert run_main(monkeypatch, commands.main, "imagegen", "train", *typed) == 1
    logging.getLogger().warning("a line after the refusal")
    assert not refused.exists()


def test_nothing_heavy_is_imported_before_it_is_used() -> None:
    program = """
import sys
import imagegen
assert {"Controls", "complete", "generate", "load_checkpoint"} <= set(dir(imagegen))
heavy = {"torch", "numpy", "hydra", "omegaconf", "pytorch_lightning"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
import imagegen.commands.registry
assert not heavy & set(sys.modules), heavy & set(sys.modules)
import imagegen.generation.sampling_loop, imagegen.generation.job
from imagegen import *
assert generate is imagegen.generation.sampling_loop.generate
assert complete is imagegen.generation.sampling_loop.complete
assert load_checkpoint is imagegen.checkpoint.reading.load_checkpoint
assert Controls is imagegen.heads.controls.Controls
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_the_package_offers() -> None:
    modules = {module.name for module in pkgutil.iter_modules(imagegen.__path__)}
    # Importing a module of that name would replace the function.
    assert not modules & set(imagegen.__all__)
    assert [name for name in imagegen.__all__ if not callable(getattr(imagegen, name))] == []
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        import_module("imagegen").nothing  # noqa: B018


def test_the_commit_is_that_of_the_clone_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(folder: Path, *arguments: str) -> str:
        own = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", *own, *arguments], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    if shutil.which("git") is None:
        pytest.skip("needs git")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--message=theirs")
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path / "env" / "site-packages" / "imagegen")
    (tmp_path / "env" / "site-packages" / "imagegen").mkdir(parents=True)
    assert provenance.commit() is None
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path / "imagegen")
    assert provenance.commit() == git(tmp_path, "rev-parse", "HEAD")


def test_what_is_typed_without_a_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installation.typed("train") == "python train.py"
    assert installation.typed("find-lr") == "imagegen find-lr"
    assert installation.pip_install("codec", "constriction") == "pip install -e '.[codec]'"
    monkeypatch.setattr(installation, "IN_CLONE", False)
    assert installation.typed("train") == "imagegen train"
    assert installation.pip_install("codec", "constriction") == "pip install constriction"


def test_the_clone_keeps_data_and_outputs() -> None:
    assert installation.IN_CLONE
    assert installation.PROJECT_ROOT == ROOT
    assert cli.conf_folder() == ROOT / "conf"
