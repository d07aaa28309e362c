"""What is behind the page: options, drawings in threads, pictures; without Gradio or a browser."""

from __future__ import annotations

import gc
import io
import re
import shlex
import shutil
import socket
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from imagegen.cli.entry import compose
from imagegen.commands.page import command, page_options, pictures, server, watched
from imagegen.commands.page import job as jobs
from imagegen.commands.page.job import Job, Stopped
from imagegen.commands.page.page_options import PageOptions
from imagegen.commands.page.studio import Desk, Studio, Wish, quoted, sample_command
from imagegen.commands.page.surprises import Picture, Surprises
from imagegen.core.errors import UserError
from imagegen.core.installation import PROJECT_ROOT
from imagegen.core.spec import ImageSpec
from imagegen.data.digits import Digits
from imagegen.data.regions import read_region
from imagegen.generation.images import from_display
from imagegen.generation.sampling_loop import generate
from imagegen.generation.state_walk import head_matrices, softmax_bytes, walk_state
from imagegen.tracking.metrics_file import MetricsFile
from imagegen.training.run_folder import claim_run_folder
from tests.helpers import (
    read_images,
    run_main,
    sample,
    save_colour_checkpoint,
    save_tiny_checkpoint,
    tiny_model,
    write_image,
)
from tests.tracking.helpers import make_run

GREY, COLOUR = ImageSpec(5, 4, 1, 17), ImageSpec(4, 6, 3)


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("run") / "tiny.ckpt", n_classes=10)


@pytest.fixture(scope="module")
def studio(ckpt: Path) -> Studio:
    return Studio(str(ckpt), "cpu")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["ckpt=''"], "ckpt is missing"),
        (["ckpt=a", "host=0.0.0.0"], "host=0.0.0.0 lets other machines .* add password="),
        (["ckpt=a", "host=192.168.0.7"], "add password="),
        (["ckpt=a", "host=a.example"], "add password="),
        (["ckpt=a", "password=' '"], "password is empty"),
        (["ckpt=a", "runs=/no/where"], "runs=/no/where is not a folder"),
        (["ckpt=a", "port=0"], "port=0, but it must be a whole number from 1 to 65535"),
    ],
)
def test_options_that_cannot_be_are_refused(typed: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        PageOptions.from_config(compose("page", typed))


def test_models_that_come_with_the_project_are_shown_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def ckpts(*typed: str) -> tuple[str, ...]:
        return PageOptions.from_config(compose("page", list(typed))).ckpts

    assert "models/mnist" in ckpts()
    others = [each for each in ckpts() if each != "models/mnist"]
    assert ckpts("ckpt=models/mnist/") == ("models/mnist/", *others)
    assert ckpts("ckpt=a") == ("a", *ckpts())
    monkeypatch.chdir(PROJECT_ROOT / "tests")
    assert str(PROJECT_ROOT / "models/mnist") in ckpts()
    monkeypatch.setattr(page_options, "shipped_models", list)
    assert ckpts("ckpt=a") == ("a",)
    with pytest.raises(UserError, match="ckpt is missing"):
        ckpts()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_this_machine_needs_no_password(host: str) -> None:
    assert PageOptions.from_config(compose("page", ["ckpt=a", f"host='{host}'"])).password is None
    typed = ["ckpt=a", "host=0.0.0.0", "password=123"]
    assert PageOptions.from_config(compose("page", typed)).password == "123"


@pytest.mark.parametrize("screen", [True, False])
@pytest.mark.parametrize("typed", [["open=true"], []])
def test_a_browser_is_opened_where_there_is_a_screen(
    monkeypatch: pytest.MonkeyPatch, ckpt: Path, screen: bool, typed: list[str]
) -> None:
    opened: list[str] = []
    closed: list[bool] = []
    page = SimpleNamespace(local_url="the address", close=lambda verbose: closed.append(verbose))

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "find_spec", lambda name: True)
    monkeypatch.setattr(server, "start", lambda studios, options: page)
    monkeypatch.setattr(server, "studios_of", lambda options: [])
    monkeypatch.setattr(server, "_check_free", lambda host, port: None)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("time.sleep", interrupt)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("DISPLAY", ":0" if screen else "")
    server.run(compose("page", [f"ckpt={ckpt}", *typed]))
    assert opened == (["the address"] if screen and typed else [])
    assert closed == [False]


def test_the_command_refuses_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ckpt: Path
) -> None:
    monkeypatch.setattr(server, "find_spec", lambda name: None)
    assert run_main(monkeypatch, command.main, "imagegen page", f"ckpt={ckpt}") == 1
    assert re.search(r"error: the page needs Gradio.* pip install \S+", capsys.readouterr().err)
    monkeypatch.setattr(server, "find_spec", lambda name: True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        typed = [f"ckpt={ckpt}", f"port={taken.getsockname()[1]}"]
        assert run_main(monkeypatch, command.main, "imagegen page", *typed) == 1
    assert "choose another host or port" in capsys.readouterr().err


def _counting(steps: int | None) -> Callable[[Callable[[int], None]], int]:
    def work(show: Callable[[int], None]) -> int:
        count = 0
        while count != steps:
            count += 1
            show(count)
        return -1

    return work


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "PAUSE", 0.001)


def test_a_job_hands_its_newest_frames_on_and_its_last_always(quick: None) -> None:
    frames = list(Job(_counting(50), threading.Lock()).frames())
    assert frames[-1] == -1
    assert frames[:-1] == sorted(frames[:-1])


def test_the_last_frame_does_not_wait_for_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "PAUSE", 600)
    shown, go_on = threading.Event(), threading.Event()

    def work(show: Callable[[int], None]) -> int:
        show(0)
        shown.set()
        go_on.wait()
        return -1

    frames = Job(work, threading.Lock()).frames()
    assert next(frames) == 0
    shown.wait()
    threading.Timer(0.1, go_on.set).start()
    assert list(frames) == [-1]


def test_a_job_is_stopped_from_outside_and_by_who_leaves(quick: None) -> None:
    before, turn = threading.active_count(), threading.Lock()
    job = Job(_counting(None), turn)
    with pytest.raises(Stopped):
        for frame in job.frames():
            if frame > 3:
                job.stop()
    frames = Job(_counting(None), turn).frames()
    next(frames)
    frames.close()  # as when a generator is given up
    assert threading.active_count() == before
    assert not turn.locked()


def test_a_job_that_nobody_asks_for_ends(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "PATIENCE", 1.0)
    job = Job(_counting(None), threading.Lock())
    frames = job.frames()
    next(frames)
    job._thread.join(60)
    assert not job._thread.is_alive()


def test_jobs_wait_for_their_turn_and_errors_come_through(quick: None) -> None:
    turn = threading.Lock()

    def fail(show: Callable[[int], None]) -> int:
        raise UserError("a sentence.")

    with pytest.raises(UserError, match="a sentence"):
        list(Job(fail, turn).frames())
    with turn:
        waiting = Job(_counting(1), turn)
        waiting.stop()
        with pytest.raises(Stopped):
            list(waiting.frames())


def test_a_completion_keeps_what_is_visible(studio: Studio, quick: None) -> None:
    spec = studio.spec
    image = np.random.default_rng(0).integers(0, 17, spec.shape).astype(np.uint8)
    for word in ("top:0.5", "hole:0.4"):  # the latter by particles
        visible = read_region(word).visible(spec.height, spec.width)
        frames = list(studio.completions("me", image, visible, Wish(3, label=("7",))))
        assert frames[-1].finished
        assert frames[-1].levels.shape == (3, *spec.shape)
        for frame in frames:
            assert (frame.levels[:, visible] == image[visible]).all()
            assert frame.known[:, visible].all()
    assert not studio.desk.turn.locked()


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (Wish(0), "number of images must be between 1 and 64, not 0"),
        (Wish(65), "not 65"),
        (Wish(1, seed=-1), "seed=-1"),
        (Wish(1, temperature=-1.0), "temperature=-1.0"),
        (Wish(1, top_p=0.0), "top_p"),
        (Wish(1, guidance=2.0), "guidance=2 needs a class to guide towards; choose one"),
        (Wish(1, label=("cat",)), "label=cat is not one of"),
    ],
)
def test_what_cannot_be_drawn_is_a_sentence(studio: Studio, wish: Wish, said: str) -> None:
    with pytest.raises(UserError, match=said):
        list(studio.samples("me", wish))
    assert not studio.desk.turn.locked()


def test_nothing_to_draw_is_a_sentence(studio: Studio) -> None:
    image = np.zeros(studio.spec.shape, np.uint8)
    with pytest.raises(UserError, match="nothing is hidden"):
        list(studio.completions("me", image, np.ones(image.shape[:2], bool), Wish(1)))


def test_a_checkpoint_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = save_tiny_checkpoint(tmp_path / "tiny.ckpt")
    studio = Studio(str(path), "cpu")
    first = studio.loaded()
    assert studio.loaded() is first
    save_tiny_checkpoint(tmp_path / "new.ckpt", seed=1).replace(path)
    assert studio.loaded() is not first
    path.unlink()
    with pytest.raises(UserError, match="does not exist"):
        list(studio.samples("me", Wish(1)))
    save_tiny_checkpoint(path)
    assert list(studio.samples("me", Wish(1)))[-1].finished


def test_one_model_is_in_memory(tmp_path: Path) -> None:
    paths = [save_tiny_checkpoint(tmp_path / f"{seed}.ckpt", seed=seed) for seed in range(2)]
    desk = Desk()
    first, second = (Studio(str(path), "cpu", desk=desk) for path in paths)
    drawn = list(first.samples("me", Wish(2)))[-1].levels
    kept = weakref.ref(first.loaded().model)
    assert first.spec == second.spec
    assert kept() is not None  # what was asked of the second needs no weights
    list(second.samples("you", Wish(1)))
    gc.collect()
    assert kept() is None
    assert np.array_equal(list(first.samples("me", Wish(2)))[-1].levels, drawn)


def test_what_ends_a_drawing_is_said(studio: Studio) -> None:
    def endless(show: Callable[[int], None]) -> int:
        while True:
            show(1)

    first = studio.run("me", endless)
    next(first)
    second = studio.run("me", lambda show: 2)
    next(second)
    with pytest.raises(Stopped, match="another drawing was asked for"):
        list(first)
    list(second)
    third = studio.run("me", endless)
    next(third)
    studio.close()
    with pytest.raises(Stopped, match=r"^stopped$"):
        list(third)


def test_the_command_is_easy_to_read() -> None:
    typed = sample_command("models/mnist", Wish(4, 5, label=("3", "T-shirt/top")))
    assert typed.endswith(""" ckpt=models/mnist n=4 seed=5 "label=['3',T-shirt/top]\"""")


def test_the_command_draws_the_same_images(studio: Studio, ckpt: Path, tmp_path: Path) -> None:
    wish = Wish(4, seed=5, temperature=0.8, top_p=0.9, guidance=1.5, label=("3", "1"))
    drawn = list(studio.samples("me", wish))[-1].levels
    words = shlex.split(sample_command(str(ckpt), wish))
    out = sample(ckpt, tmp_path / "out", *words[words.index(f"ckpt={ckpt}") + 1 :])
    files = read_images(out)
    assert len(files) == 4
    for image, expected in zip(files.values(), drawn, strict=True):
        assert np.array_equal(from_display(image, 17), expected)


@pytest.mark.parametrize("word", ["a b", "it's", "true", "1e3", "a,b", "[x]", "T-shirt/top", "ü"])
def test_words_reach_hydra_as_they_are(word: str) -> None:
    assert compose("sample", [f"label={quoted(word)}"]).label == word


@pytest.mark.parametrize("spec", [GREY, COLOUR])
def test_the_canvas_keeps_every_visible_pixel(spec: ImageSpec) -> None:
    rng = np.random.default_rng(0)
    levels = rng.integers(0, spec.levels, spec.shape).astype(np.uint8)
    visible = rng.random(spec.shape[:2]) < 0.5
    found, kept = pictures.read_canvas(pictures.write_canvas(levels, visible, spec), spec)
    assert np.array_equal(kept, visible)
    assert np.array_equal(found[visible], levels[visible])


@pytest.mark.parametrize(
    "sent",
    [None, "", "data:image/png;base64,AAAA", "data:image/png;base64,%%%", "x" * 10**7],
)
def test_a_canvas_that_is_none_is_a_sentence(sent: object) -> None:
    with pytest.raises(UserError, match="did not arrive"):
        pictures.read_canvas(sent, GREY)
    other = pictures.write_canvas(np.zeros((4, 4, 1), np.uint8), np.ones((4, 4), bool), GREY)
    with pytest.raises(UserError, match="did not arrive"):
        pictures.read_canvas(other, GREY)


def test_an_upload_is_read_as_complete_reads_it(tmp_path: Path) -> None:
    pixels = np.zeros((10, 8, 4), np.uint8)
    pixels[..., :3], pixels[..., 3] = 255, 255
    pixels[5:, :, 3] = 0
    Image.fromarray(pixels).save(tmp_path / "half.png")
    levels, visible = pictures.read_upload(tmp_path / "half.png", GREY)
    assert levels.shape == GREY.shape
    assert visible[0].all()
    assert not visible[-1].any()
    Image.new("L", (40, 50), 128).save(tmp_path / "plain.gif")
    assert pictures.read_upload(tmp_path / "plain.gif", GREY)[1].all()
    (tmp_path / "broken.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"image broken\.png cannot be read") as refused:
        pictures.read_upload(tmp_path / "broken.png", GREY)
    assert str(tmp_path) not in str(refused.value)


def test_an_animation_ends_with_the_last_picture() -> None:
    gif = pictures.GrowingGif()
    for shade in range(200):
        gif.add(np.full((3, 3, 1), shade, np.uint8))
    with Image.open(io.BytesIO(gif.file())) as image:
        assert 10 < image.n_frames <= pictures.MOST_FRAMES + 1  # type: ignore[attr-defined]
        image.seek(image.n_frames - 1)  # type: ignore[attr-defined]
        assert np.asarray(image.convert("L"))[0, 0] == 199


def test_colours_of_a_matrix() -> None:
    colours = pictures.heat(np.array([[-2.0, 0.0, 2.0]], np.float32), 2.0)
    assert colours.tolist() == [[[33, 102, 172], [255, 255, 255], [178, 24, 43]]]
    assert (pictures.heat(np.zeros((1, 1), np.float32), 0.0) == 255).all()


@pytest.mark.parametrize("name", ["linear.LinearAttention", "softmax.SoftmaxAttention"])
def test_the_walk_of_a_state_draws_the_image_of_its_seed(name: str) -> None:
    model = tiny_model(GREY, attention={"_target_": f"imagegen.attention.{name}"}, n_layers=2)
    moments = list(walk_state(model, 1, seed=4, every=3))
    (expected,) = next(iter(generate(model, 1, seed=4)))
    assert np.array_equal(moments[-1].levels, expected)
    assert moments[-1].known.all()
    assert [moment.position for moment in moments] == [3, 6, 9, 12, 15, 18, 20]
    assert not moments[0].known.all()
    if name.startswith("linear"):
        assert len({moment.state_bytes for moment in moments}) == 1
        assert {moment.matrices.shape for moment in moments} == {(2, 8, 8)}
    # Two layers of two heads of eight features, keys and values, four bytes each.
    assert softmax_bytes(model, 3) == 2 * 2 * 8 * 2 * 4 * 3
    with pytest.raises(UserError, match="layer 2 is not one"):
        walk_state(model, 2)


def test_the_matrices_of_linear_attention_are_its_state() -> None:
    model = tiny_model(GREY)
    _, state = model.step(None, model.initial_state(2))
    (layer,) = state.layers
    found: Any = layer
    assert torch.equal(head_matrices(layer), found.s[0])


def test_a_picture_of_a_distribution() -> None:
    probabilities = np.array([0.5, 0.125, 0.375])
    svg = ElementTree.fromstring(pictures.bars(probabilities, 2, 0.5, "a < b"))
    assert svg.attrib["aria-label"] == "a < b"
    path = next(each.attrib["d"] for each in svg if each.attrib.get("class") == "bars")
    bottom = float(re.findall(r"^M\S+ ([\d.]+)", path)[0])
    heights = [bottom - float(y) for y in re.findall(r"V([\d.]+)h", path)]
    assert np.allclose(np.array(heights) / heights[0], probabilities / 0.5, atol=0.01)
    assert [text.text for text in svg.iter("text")] == ["0.5", "0", "0", "1", "2"]


def test_surprises_agree_with_the_probabilities_of_a_pixel(studio: Studio) -> None:
    surprises = Surprises(studio)
    looked = surprises.look("me", 7)
    split = Digits().split("test")
    assert split.labels is not None
    assert looked.picture.label == str(split.labels[7])
    assert looked.picture.name == f"digits/test/7 ({split.labels[7]})"
    for row, column in (looked.first, (0, 0), (7, 7)):
        pixel = surprises.at("me", row, column)
        assert pixel.levels == split.images[7, row, column]
        (p,) = pixel.probabilities
        assert p.sum() == pytest.approx(1)
        assert -np.log2(p[pixel.levels[0]]) == pytest.approx(pixel.bits, rel=1e-3)
        assert p[looked.best[row, column, 0]] == p.max()
    assert looked.bits.max() == looked.bits[looked.first]
    without = surprises.look("me", Picture(looked.picture.levels, "a file"))
    assert without.bits_per_dim != looked.bits_per_dim


def test_channels_are_told_apart(tmp_path: Path) -> None:
    surprises = Surprises(Studio(str(save_colour_checkpoint(tmp_path)), "cpu"))
    image = np.random.default_rng(0).integers(0, 256, (4, 6, 3)).astype(np.uint8)
    surprises.look("me", Picture(image, "a file"))
    pixel = surprises.at("me", 3, 5)
    assert pixel.probabilities.shape == (3, 256)
    bits = -np.log2(pixel.probabilities[range(3), pixel.levels]).sum()
    assert bits == pytest.approx(pixel.bits, rel=1e-3)


def test_what_cannot_be_looked_at_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_checkpoint(tmp_path / "tiny.ckpt")
    studio = Studio(str(path), "cpu")
    surprises = Surprises(studio)
    with pytest.raises(UserError, match="no image is shown"):
        surprises.at("me", 0, 0)
    with pytest.raises(UserError, match="test image=360"):
        surprises.look("me", 360)
    surprises.look("me", 0)
    with pytest.raises(UserError, match="row=8"):
        surprises.at("me", 8, 0)
    monkeypatch.setattr("imagegen.commands.page.surprises.MOST_VISITORS", 1)
    surprises.look("you", 1)
    with pytest.raises(UserError, match="no image is shown"):
        surprises.at("me", 0, 0)
    save_tiny_checkpoint(tmp_path / "new.ckpt", seed=1).replace(path)
    with pytest.raises(UserError, match="checkpoint has changed"):
        surprises.at("you", 0, 0)
    path.unlink()
    with pytest.raises(UserError, match="does not exist"):
        surprises.at("you", 0, 0)
    assert not studio.desk.turn.locked()


def test_nothing_is_downloaded_for_a_test_image_unless_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mnist = {"_target_": "imagegen.data.mnist.MNIST", "root": str(tmp_path), "download": True}
    ckpt = str(save_tiny_checkpoint(tmp_path / "m.ckpt", mnist))
    with pytest.raises(UserError, match="MNIST was not found"):
        Surprises(Studio(ckpt, "cpu")).look("me", 0)
    asked: list[tuple[Path, bool]] = []
    monkeypatch.setattr(
        "imagegen.data.mnist.MNIST.prepare", lambda self: asked.append((self.root, self.download))
    )
    typed = ["ckpt=a", f"dataset.root={tmp_path / 'b'}", "dataset.download=true"]
    dataset = PageOptions.from_config(compose("page", typed)).dataset
    with pytest.raises(UserError):
        Surprises(Studio(ckpt, "cpu", dataset=dataset)).look("me", 0)
    assert asked == [(tmp_path / "b", True)]


def test_every_model_gets_ready(ckpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is compiled for some of them, not for images of few pixels."""
    studios = [Studio(str(ckpt), "cpu"), Studio(str(ckpt), "cpu")]
    ready: list[Studio] = []
    monkeypatch.setattr(Studio, "get_ready", lambda studio: ready.append(studio))
    server._get_ready(studios)
    assert ready == studios[::-1]


def test_the_first_visitor_need_not_wait_for_compiling(ckpt: Path, tmp_path: Path) -> None:
    studio = Studio(str(ckpt), "cpu")
    studio.get_ready()
    assert studio.desk._read is not None
    broken = Studio(str(save_tiny_checkpoint(tmp_path / "gone.ckpt")), "cpu")
    (tmp_path / "gone.ckpt").unlink()
    broken.get_ready()
    assert not broken.desk.turn.locked()


def test_runs_are_read_again_when_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "FRESH", 0.0)
    make_run(tmp_path / "a")
    second = make_run(tmp_path / "b", rows=[], summary={"state": "running"})
    below = watched.RunsBelow(tmp_path)
    with claim_run_folder(second, resuming=True):
        found = watched_now(below)
        assert {name: each.run.state for name, each in found.items()} == {
            "a": "finished",
            "b": "running",
        }
        assert watched.choose(found, [], None) == ["b", "a"]
        again = watched_now(below)
        assert again["a"] is found["a"]
        assert again["b"] is found["b"]
        metrics = MetricsFile(second)
        metrics.log_metrics({"train/bits_per_dim": 3.0}, 9)
        changed = watched_now(below)
        assert changed["a"] is found["a"]
        assert (changed["b"].run.steps, changed["b"].curve.train.bits_per_dim) == (10, [3.0])
    metrics.finalize("success")
    assert watched_now(below)["b"].run.state == "crashed"
    # A choice stays, without what has vanished; what begins to train is added to it.
    assert watched.choose(found, ["a", "gone"], ["a", "b"]) == ["a"]
    assert watched.choose(found, ["a"], ["a"]) == ["a", "b"]
    assert watched.choose(found, [], ["a", "b"]) == []
    shutil.rmtree(second)
    assert list(watched_now(below)) == ["a"]
    below.folder = tmp_path / "none"
    assert watched_now(below) == {}


def watched_now(below: watched.RunsBelow) -> dict[str, watched.Watched]:
    """Whatever it has been told a moment ago."""
    below._stale = 0.0
    return below.now()


def test_curves_of_runs_below_a_folder(tmp_path: Path) -> None:
    make_run(tmp_path / "a", lr=0.1)
    make_run(tmp_path / "b", rows=[], lr=0.2)
    below = watched.RunsBelow(tmp_path)
    plot = watched.Plot("images", log=True, log_bits=True, width=4.0)
    svg = below.picture(["a", "b", "gone"], plot)
    assert b"<svg" in svg
    assert below.picture(["a"], plot) is svg  # not drawn again
    for names, said in (([], "no run is chosen"), (["b"], "no run has logged")):
        with pytest.raises(UserError, match=said):
            below.picture(names, plot)
    samples = tmp_path / "a" / "samples"
    for name in ("step-0000040-samples", "step-0000200-samples", "step-0000040-completions"):
        write_image(samples / f"{name}.png", (4, 4))
    newest = watched.newest_grids(tmp_path / "a")
    assert {kind: (step, path.name) for kind, (step, path) in newest.items()} == {
        "samples": (200, "step-0000200-samples.png"),
        "completions": (40, "step-0000040-completions.png"),
    }
    assert watched.newest_grids(tmp_path / "b") == {}
