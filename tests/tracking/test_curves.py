"""Learning curves, the options in which runs differ, and `imagegen runs plot=FILE.png`."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from imagegen.commands.runs import main
from imagegen.core.errors import UserError
from imagegen.tracking.curves import Points, curves, plot_curves
from imagegen.tracking.metrics_rows import read_rows
from imagegen.tracking.run_options import differences, images_per_step, options_of
from imagegen.training.run_folder import claim_run_folder
from tests.tracking.helpers import CONFIG, make_run


def test_points_of_a_run(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    (curve,) = curves([tmp_path])
    np.testing.assert_array_equal(curve.train.steps, [10, 20, 30])
    np.testing.assert_array_equal(curve.train.images, [80, 160, 240])
    # 80 images at 40 a second, then at 20, then at 80.
    np.testing.assert_allclose(curve.train.seconds, [2, 6, 7])
    np.testing.assert_array_equal(curve.train.bits_per_dim, [3, 2, 1])
    np.testing.assert_array_equal(curve.val.steps, [15, 30])
    np.testing.assert_allclose(curve.val.seconds, [4, 7])
    np.testing.assert_array_equal(curve.val.bits_per_dim, [2.5, 1.25])
    assert all(curve.known(name) for name in ("steps", "images", "seconds"))


def test_smoothing_is_a_mean_around_each_point() -> None:
    bits = np.random.default_rng(0).normal(size=150)
    steps = np.arange(150.0)
    smooth = Points(steps, 8 * steps, steps / 2, bits).smoothed()
    for i in range(150):
        around = bits[i - i // 20 : i + i // 20 + 1]
        assert smooth.bits_per_dim[i] == pytest.approx(around.mean(), abs=1e-12)
    np.testing.assert_array_equal(smooth.steps, steps)
    assert smooth.bits_per_dim[0] == bits[0]
    assert smooth.bits_per_dim[100:].std() < bits[100:].std() / 2
    nothing = np.empty(0)
    assert len(Points(nothing, nothing, nothing, nothing).smoothed().steps) == 0


def test_images_of_a_step(tmp_path: Path) -> None:
    several = {"devices": "auto", "accumulate_grad_batches": 2}
    folders = {
        8.0: make_run(tmp_path / "one"),
        32.0: make_run(tmp_path / "four", summary={"processes": 4}, trainer=several),
        math.nan: make_run(tmp_path / "unknown", trainer=several),
    }
    for expected, folder in folders.items():
        assert images_per_step(folder) == pytest.approx(expected, nan_ok=True)
    curve = next(each for each in curves([tmp_path]) if each.run.folder.name == "unknown")
    assert curve.known("steps")
    assert not curve.known("images")
    assert not curve.known("seconds")


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    path = folder / "metrics.csv"
    text = path.read_bytes()
    for cut in range(1, len(text.splitlines(keepends=True)[-1]) + 1):
        path.write_bytes(text[:-cut])
        (curve,) = curves([folder])
        assert curve.val.bits_per_dim.tolist() == [2.5]
        assert curve.train.steps.tolist() == [10, 20]
    path.write_bytes(text)
    assert len(read_rows(path)) == 4


@pytest.mark.parametrize("content", [None, b"", b"step,loss\r\n", b"\xff\xfe\0", b"a,b\r\n1,2\r\n"])
def test_runs_without_metrics_have_no_points(tmp_path: Path, content: bytes | None) -> None:
    path = make_run(tmp_path / "run") / "metrics.csv"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    (curve,) = curves([tmp_path])
    assert not curve.known("steps")
    assert len(curve.train.steps) == len(curve.val.steps) == 0


def test_damaged_numbers_are_left_out(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run") / "metrics.csv"
    path.write_text("step,train/bits_per_dim\n9,3.0\n19,x\n29,nan\n39,inf\nz,2.0\n49,2.5\n")
    (curve,) = curves([tmp_path])
    assert curve.train.steps.tolist() == [10, 50]


def test_differences_are_as_they_are_typed(tmp_path: Path) -> None:
    softmax = {"_target_": "imagegen.attention.softmax.SoftmaxAttention"}
    places = {
        "dataset": {"_target_": "imagegen.data.mnist.MNIST", "root": "/elsewhere"},
        "callbacks": {"best": {"dirpath": "/there/checkpoints"}},
        "resume": "auto",
    }
    a = make_run(tmp_path / "a")
    b = make_run(tmp_path / "b", seed=1, model={"order": "raster", "convolution": None}, **places)
    c = make_run(tmp_path / "c", attention=softmax)
    d = make_run(tmp_path / "d", attention={**CONFIG["attention"], "feature_map": "relu"})
    assert differences([a, a]) == {}
    assert differences([a, b]) == {"seed": ["0", "1"], "model.convolution": ["[2,2]", "null"]}
    assert differences([a, c]) == {"attention": ["linear", "softmax"]}
    found = differences([a, c, d])
    assert found["attention.feature_map"] == ["elu", None, "relu"]
    assert set(found) == {"attention", "attention.feature_map"}
    assert options_of(a)["optimizer"] == "SGD"  # not one of conf/
    (d / "config.yaml").write_text("{: ]")
    assert options_of(d) == {}


def test_former_names_are_no_difference(tmp_path: Path) -> None:
    names = ("imagegen.muon.Muon", "imagegen.training.muon.Muon")
    a, b = (
        make_run(tmp_path / str(i), optimizer={"_target_": name}) for i, name in enumerate(names)
    )
    assert differences([a, b]) == {}
    assert options_of(a)["optimizer"] == "muon"


@pytest.mark.parametrize("against", ["steps", "images", "seconds"])
@pytest.mark.parametrize("log", [False, True])
def test_what_is_drawn(tmp_path: Path, against: str, log: bool) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib (extra `plot`)")
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", seed=1)
    with claim_run_folder(tmp_path / "b", resuming=True):
        found = curves([tmp_path])
    by_name = {curve.run.folder.name: curve for curve in found}
    text = plot_curves(by_name, against, log, "svg").decode()
    wanted = {"steps": "steps", "images": "images seen", "seconds": "seconds of training"}
    for words in (wanted[against], "bits/dim", "a seed=0", "b seed=1 (running)"):
        assert f"<!-- {words} -->" in text
    assert ("10^{" in text) == log


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib (extra `plot`)")
    runs = tmp_path / "runs"
    make_run(runs / "a")
    make_run(runs / "b$x_1$", seed=1)
    make_run(runs / "empty", rows=[])
    make_run(runs / "gpus", trainer={"devices": "auto"})
    file = tmp_path / "new" / "curves.png"
    assert main([str(runs), f"plot={file}", "log=true"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"learning curves of 3 runs: {file}\n"
    assert printed.err == "there is no bits/dim against steps in empty\n"
    assert file.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in file.parent.iterdir()] == ["curves.png"]
    svg = tmp_path / "curves.SVG"
    assert main(["--plot", str(svg), "--against", "images", "log=false", str(runs)]) == 0
    assert capsys.readouterr().err == "there is no bits/dim against images in gpus, empty\n"
    assert b"images seen" in svg.read_bytes()
    assert main([str(runs), "sort=folder", "json=true"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [Path(run["folder"]).name for run in told] == ["a", "b$x_1$", "empty", "gpus"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["plot=x.jpg"], "plot=x.jpg, but its name must end in one of .png, .svg, .pdf."),
        (["plot=folder/x"], "plot=folder/x, but its name must end in one of"),
        (["plot="], "plot=, but its name must end in one of .png, .svg, .pdf."),
        (["plot=x.png", "against=pixels"], "against=pixels is unknown; it can be steps, images"),
        (["sort=age"], "sort=age is unknown; it can be best"),
        (["plot=file/x.png"], "cannot write file/x.png"),
        (["plot=x.png", "log=yes"], "log=yes, but it must be true or false."),
        (["plot=x.png", "json=true"], "plot and json do not go together; leave one out."),
        (["against=images"], "against needs plot=FILE.png; add it."),
        (["log=true"], "log needs plot=FILE.png; add it."),
        (["polt=x.png"], "there is no option polt; did you mean plot? it can be plot, against,"),
        (["nowhere", "plot=x.png"], "nowhere is not a folder"),
        (["empty", "plot=x.png"], "there is no bits/dim against steps in empty"),
    ],
)
def test_refusals_leave_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    sentence: str,
) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib (extra `plot`)")
    monkeypatch.chdir(tmp_path)
    make_run(Path("empty"), rows=[])
    Path("file").touch()
    assert main(words if words[0] in ("nowhere", "empty") else ["empty", *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert sentence in error
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "file"}


def test_without_matplotlib_a_sentence_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([str(tmp_path), f"plot={tmp_path / 'x.png'}"]) == 1
    assert "needs matplotlib, which is not installed: pip install" in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()
    with pytest.raises(UserError, match="needs matplotlib"):
        plot_curves({})
