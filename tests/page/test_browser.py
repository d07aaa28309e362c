"""The page in a real browser: Debian's Chromium, driven by Playwright.

With IMAGEGEN_SCREENSHOTS=<run folder>, pictures of its page are written to docs/images.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.page import measured, memory, serve, stroke, table
from imagegen.commands.page.studio import Studio
from imagegen.core.installation import PROJECT_ROOT, shipped_models
from imagegen.data.digits import Digits
from imagegen.evaluation.maps import heat, most_bits
from imagegen.evaluation.surprise import bits_of_pixels, distribution_at
from imagegen.tracking.metrics_file import MetricsFile
from imagegen.training.run_folder import claim_run_folder
from tests.helpers import save_colour_checkpoint, save_tiny_checkpoint, write_image
from tests.tracking.helpers import make_run

PACKAGES = ("gradio", "playwright", "axe_playwright_python")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MISSING = [
    *(name for name in PACKAGES if find_spec(name) is None),
    *([] if CHROMIUM else ["chromium"]),
]
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
    # Gradio and what it brings warn of each other.
    pytest.mark.filterwarnings("ignore"),
]
WAIT = 60_000  # milliseconds, on a machine that has other things to do

PIXELS = """async (image) => {
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = image.naturalWidth; canvas.height = image.naturalHeight;
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  return [...context.getImageData(0, 0, canvas.width, canvas.height).data];
}"""
PAPER = (
    """(paper) => [...paper.getContext("2d").getImageData(0, 0, paper.width, paper.height).data]"""
)
# How many pictures there were, and whether the last of them is the end.
OBSERVE = """(element) => {
  window.pictures = new Set();
  new MutationObserver(() => {
    const shown = element.querySelector("[data-finished=False]");
    if (shown) window.pictures.add(shown.innerHTML);
  }).observe(element, { childList: true, subtree: true, attributes: true });
}"""


@dataclass
class Served:
    """A page that is served, and how long a step of its model takes."""

    studio: Studio
    url: str
    path: Path
    pause: list[float] = field(default_factory=lambda: [0.0])


def _serve(paths: list[Path], runs: Path, password: str | None = None) -> Iterator[Served]:
    studio, page, url = serve(list(map(str, paths)), runs, password)
    yield Served(studio, url, paths[0])
    page.close(verbose=False)
    del page
    # Gradio leaves event loops open, which is complained of where they are collected.
    gc.collect()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = save_tiny_checkpoint(tmp_path_factory.mktemp("run") / "tiny.ckpt", n_classes=10)
    other = save_colour_checkpoint(tmp_path_factory.mktemp("colour"))
    yield from _serve([path, other], tmp_path_factory.mktemp("outputs"))


@pytest.fixture(autouse=True)
def _slow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes a moment, as with models of use."""
    if "served" not in request.fixturenames:
        return
    served: Served = request.getfixturevalue("served")
    served.pause[0] = 0.0
    model = served.studio.loaded().model
    step = type(model).step

    def slow(*args: Any) -> Any:
        time.sleep(served.pause[0])
        return step(model, *args)

    monkeypatch.setattr(model, "step", slow, raising=False)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # The sandbox cannot be had in most containers.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages; in the end, none has asked another machine, nor complained."""
    problems: list[str] = []
    contexts = []

    def open_page(
        url: str, width: int = 1200, height: int = 900, forgiven: str = "^$", **device: Any
    ) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": height}, **device)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT)

        def asked(request: Any) -> None:
            if not request.url.startswith((url, "data:", "blob:")):
                problems.append(request.url)

        page.on("request", asked)

        def complained(text: str) -> None:
            if not re.search(forgiven, text):
                problems.append(text)

        page.on("pageerror", lambda error: complained(str(error)))
        page.on(
            "console",
            lambda message: complained(message.text) if message.type == "error" else None,
        )
        page.goto(url)
        page.wait_for_selector("canvas[data-ready]")  # some time after it is shown
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not problems


def _finished(page: Any) -> list[np.ndarray]:
    """The completions, "h w 4", once they are drawn."""
    page.wait_for_selector("#completions [data-finished=True]")
    images = page.locator("#completions img")
    found = [images.nth(index).evaluate(PIXELS) for index in range(images.count())]
    return [np.array(pixels).reshape(8, 8, 4) for pixels in found]


def _paper(page: Any) -> np.ndarray:
    return np.array(page.locator("canvas").evaluate(PAPER)).reshape(8, 8, 4)


def _check_visible(page: Any) -> None:
    paper, completions = _paper(page), _finished(page)
    visible = paper[..., 3] == 255
    assert 0 < visible.mean() < 1
    assert paper[visible, :3].max() == 255
    assert len(completions) == 4
    for completion in completions:
        assert (completion[visible] == paper[visible]).all()


def test_a_drawing_is_completed_while_one_looks_on(
    served: Served, open_page: Callable[..., Any]
) -> None:
    page = open_page(served.url)
    stroke(page, (0.3, 0.1), (0.6, 0.4))
    page.get_by_role("button", name="Keep the top").click()
    served.pause[0] = 0.02
    page.locator("#completions").evaluate(OBSERVE)
    page.locator("#complete").click()
    _check_visible(page)
    assert len(page.evaluate("[...window.pictures]")) >= 5


def test_a_region_is_erased_and_filled_in(served: Served, open_page: Callable[..., Any]) -> None:
    page = open_page(served.url)
    stroke(page, (0.5, 0.1), (0.5, 0.9))
    page.get_by_role("button", name="Erase").click()
    stroke(page, (0.3, 0.55), (0.7, 0.55))
    erased = _paper(page)[..., 3] == 0
    assert 2 < erased.sum() < 32
    page.locator("#complete").click()
    _check_visible(page)
    # What was erased can be had back, from the keyboard too.
    page.get_by_role("button", name="Restore").click()
    stroke(page, (0.0, 0.55), (1.0, 0.55))
    assert (_paper(page)[..., 3] == 255).all()
    page.get_by_role("button", name="Erase").click()
    page.locator("canvas").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Space")
    page.locator("#complete").focus()
    assert (_paper(page)[..., 3] == 0).sum() == 1


def test_it_can_be_stopped(served: Served, open_page: Callable[..., Any]) -> None:
    page = open_page(served.url)
    page.get_by_role("button", name="Keep nothing").click()
    served.pause[0] = 0.5  # half a minute in all
    page.locator("#complete").click()
    page.wait_for_selector("#completions [data-finished=False]")
    page.locator("#stop-complete").click()
    started = time.monotonic()
    page.get_by_text("stopped").wait_for()
    assert time.monotonic() - started < 10
    assert not served.studio.desk.turn.locked()


def test_a_drawing_that_waits_is_stopped(served: Served, open_page: Callable[..., Any]) -> None:
    first, second = open_page(served.url), open_page(served.url)
    for page in (first, second):
        page.get_by_role("button", name="Keep nothing").click()
    served.pause[0] = 0.3
    first.locator("#complete").click()
    first.wait_for_selector("#completions [data-finished=False]")
    second.locator("#complete").click()
    second.get_by_text("waiting until another drawing has ended").wait_for()
    second.locator("#stop-complete").click()
    second.get_by_text("stopped").wait_for()
    assert served.studio.desk.turn.locked()  # the first one draws on
    first.locator("#stop-complete").click()
    first.get_by_text("stopped").wait_for()
    assert not served.studio.desk.turn.locked()


def test_a_page_is_loaded_anew_while_it_draws(
    served: Served, open_page: Callable[..., Any]
) -> None:
    # Gradio's own script complains of the connection that the browser ends.
    page = open_page(served.url, forgiven="^AbortError|Connection errored out")
    page.get_by_role("button", name="Keep nothing").click()
    served.pause[0] = 0.3
    page.locator("#complete").click()
    page.wait_for_selector("#completions [data-finished=False]")
    page.reload()
    page.wait_for_selector("canvas[data-ready]")
    served.pause[0] = 0.0
    page.get_by_role("button", name="Keep the top").click()
    page.locator("#complete").click()
    page.wait_for_selector("#completions [data-finished=True]")


def test_two_pages_and_one_that_is_closed(served: Served, open_page: Callable[..., Any]) -> None:
    first, second = open_page(served.url), open_page(served.url)
    served.pause[0] = 0.3
    for page in (first, second):
        page.get_by_role("button", name="Keep the top").click()
        stroke(page, (0.3, 0.1), (0.6, 0.4))
    first.locator("#complete").click()
    first.wait_for_selector("#completions [data-finished=False]")
    second.locator("#complete").click()
    first.close()
    served.pause[0] = 0.01
    _check_visible(second)
    assert not served.studio.desk.turn.locked()


def test_what_is_wrong_is_said(
    served: Served,
    open_page: Callable[..., Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    page = open_page(served.url)
    page.locator("#complete").click()
    page.get_by_text("nothing is hidden").wait_for()
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    upload = page.locator("input[type=file]").first
    upload.set_input_files(broken)
    page.get_by_text("broken.png cannot be read").wait_for()
    write_image(tmp_path / "good.png", (20, 20, 3))
    upload.set_input_files(tmp_path / "good.png")
    page.get_by_text("Erase what is to be drawn").wait_for()
    page.wait_for_function("() => document.querySelector('#complete') !== null")
    assert len(np.unique(_paper(page)[..., 0])) > 4
    page.get_by_role("button", name="Keep the left").click()
    for name, typed, said in (
        ("Number of completions", "17", "must be between 1 and 16, not 17"),
        ("Number of completions", "0", "must be between 1 and 16, not 0"),
        ("Number of completions", "1.5", "must be whole numbers"),
        ("Seed", "-1", "seed=-1, but"),
    ):
        box = page.get_by_label(name).first
        usual = box.input_value()
        box.fill(typed)
        page.locator("#complete").click()
        page.get_by_text(said).wait_for()
        box.fill(usual)
    page.get_by_role("tab", name="Draw").click()
    page.get_by_label("Number of images").fill("65")
    page.locator("#draw").click()
    page.get_by_text("must be between 1 and 64, not 65").wait_for()
    assert page.get_by_label("Seed").nth(1).input_value() == "0"
    page.get_by_role("tab", name="Complete").click()
    away = served.path.rename(tmp_path / "away.ckpt")
    try:
        page.locator("#complete").click()
        page.get_by_text("does not exist").wait_for()
    finally:
        away.rename(served.path)
    page.locator("#complete").click()
    page.wait_for_selector("#completions [data-finished=True]")
    assert "Traceback" not in "".join(capfd.readouterr())


def test_another_model_has_a_page_of_its_own(served: Served, open_page: Callable[..., Any]) -> None:
    """The fixture's second model: colour, 4 by 6 pixels, no classes."""
    page = open_page(served.url, width=400)
    assert page.locator("canvas").get_attribute("width") == "8"
    page.get_by_role("link", name="tiny.ckpt").last.click()
    page.wait_for_selector("canvas[data-ready][width='6']")
    assert "Home" not in page.get_by_role("link").all_inner_texts()
    assert page.url.endswith("/tinyckpt")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.get_by_label("Class", exact=True).count() == 0
    stroke(page, (0.3, 0.1), (0.6, 0.4))
    page.get_by_role("button", name="Keep the top").click()
    paper = np.array(page.locator("canvas").evaluate(PAPER)).reshape(4, 6, 4)
    page.locator("#complete").click()
    page.wait_for_selector("#completions [data-finished=True]")
    shown = np.array(page.locator("#completions img").first.evaluate(PIXELS)).reshape(4, 6, 4)
    assert (shown[:2] == paper[:2]).all()
    assert shown[2:, :, 3].min() == 255
    page.go_back()
    page.wait_for_selector("canvas[data-ready][width='8']")


def test_waiting_is_measured(served: Served, open_page: Callable[..., Any]) -> None:
    """The script benchmarks/page.py."""
    page = open_page(served.url)
    found = measured(page, served.studio, 1)
    assert len(found) == 6
    for _, pressed, without in found:
        ((seconds, pictures),) = pressed
        assert seconds > 0
        assert pictures >= 1
        assert without[0] > 0
    head, _, *lines = table(found)
    assert head.count("|") == 5
    assert [line.split(" | ")[0] for line in lines][-1] == "| draw 64"
    first, last = memory(page, 3, 1)
    assert first > 100
    assert abs(last - first) < 100


def test_samples_and_the_state(served: Served, open_page: Callable[..., Any]) -> None:
    page = open_page(served.url, width=400)
    page.get_by_role("tab", name="Draw").click()
    page.locator("#draw").click()
    page.wait_for_selector("#files a")
    first = page.locator("#samples img").get_attribute("src")
    assert page.locator("#files a").first.get_attribute("href").startswith("data:image/png")
    gif = page.locator("#files a").nth(1).get_attribute("href")
    assert gif.startswith("data:image/gif")
    assert "n=16 seed=" in page.locator("#files pre").inner_text()
    served.pause[0] = 0.02
    page.locator("#again").click()
    page.wait_for_selector("#files a", state="detached")
    page.wait_for_selector("#files a")
    assert page.locator("#samples img").get_attribute("src") == first
    page.get_by_role("tab", name="State").click()
    page.locator("#walk").click()
    page.get_by_text("step 64 of 64").wait_for()
    assert page.locator("#state img").count() == 3  # the image and two heads
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (400, "dark")])
def test_accessibility(
    served: Served, open_page: Callable[..., Any], width: int, scheme: str
) -> None:
    """By axe-core: labels, roles, contrast, and what else a program can tell."""
    from axe_playwright_python.sync_playwright import Axe

    run = make_run(served.studio.runs / "run", lr=0.1)
    page = open_page(served.url, width, color_scheme=scheme)
    contents = {
        "Complete": ("#complete", "#completions [data-finished=True]"),
        "Draw": ("#again", "#files a"),
        "State": ("#walk", "#state img"),
        "Surprise": ("#show-test", "#expected svg"),
        "Runs": (None, "#curves img"),
    }
    page.get_by_role("button", name="Keep nothing").click()
    for tab, (button, shown) in contents.items():
        page.get_by_role("tab", name=tab).click()
        if button is not None:
            page.locator(button).click()
        page.wait_for_selector(shown)
        found = Axe().run(page).response["violations"]
        assert not [(each["id"], [node["html"] for node in each["nodes"]]) for each in found], tab
    page.close()
    shutil.rmtree(run)


def _point(page: Any, row: int, column: int, tap: bool = False) -> None:
    """At a pixel of the map, which is 8 by 8."""
    box = page.locator("#maps .frame").nth(1).bounding_box()
    place = (
        box["x"] + (column + 0.5) / 8 * box["width"],
        box["y"] + (row + 0.5) / 8 * box["height"],
    )
    (page.touchscreen.tap if tap else page.mouse.move)(*place)
    page.get_by_text(f"row {row + 1}, column {column + 1}:").wait_for()


def _probabilities(page: Any) -> list[float]:
    """Heights of the bars, as shares of their sum."""
    path = page.locator("#expected .bars").get_attribute("d")
    bottom = float(re.findall(r"M\S+ ([\d.]+)", path)[0])
    heights = np.array([bottom - float(y) for y in re.findall(r"V([\d.]+)h", path)])
    shares: list[float] = (heights / heights.sum()).tolist()
    return shares


def test_the_map_of_an_image_and_the_distribution_of_a_pixel(
    served: Served, open_page: Callable[..., Any]
) -> None:
    page = open_page(served.url)
    page.get_by_role("tab", name="Surprise").click()
    page.locator("#show-test").click()
    page.wait_for_selector("#maps img")
    split = Digits().split("test")
    labels, model = split.labels[:1], served.studio.loaded().model
    bits = bits_of_pixels(model, split.images[:1], labels)[0]
    page.get_by_text(f"{bits.sum() / 64:.4f} bits/dim, given the class {labels[0]}").wait_for()
    shown = np.array(page.locator("#maps .pixels").nth(1).evaluate(PIXELS)).reshape(8, 8, 4)
    assert np.array_equal(shown[..., :3], heat(bits / most_bits(model.spec)))
    place = "row {}, column {}:".format(*(1 + at for at in np.argwhere(bits == bits.max())[0]))
    page.get_by_text(place).wait_for()
    _point(page, 2, 5)
    page.get_by_text(f"row 3, column 6: {bits[2, 5]:.2f} bits").wait_for()
    expected = distribution_at(model, split.images[0], 2, 5, label=int(labels[0]))
    assert np.allclose(_probabilities(page), expected, atol=0.005)
    # The same from the keyboard, and under another class.
    page.locator("#maps .frame[tabindex]").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowUp")
    page.get_by_text(f"row 2, column 7: {bits[1, 6]:.2f} bits").wait_for()
    page.get_by_label("Class").last.click()
    page.get_by_role("option", name="none").click()
    without = bits_of_pixels(model, split.images[:1])[0].sum()
    page.get_by_text(f"{without / 64:.4f} bits/dim; {without:.1f} bits in all").wait_for()


def test_an_image_is_touched_on_a_phone(
    served: Served, open_page: Callable[..., Any], tmp_path: Path
) -> None:
    page = open_page(served.url, width=400, has_touch=True, is_mobile=True)
    page.get_by_role("tab", name="Surprise").click()
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    upload = page.locator("input[type=file]").last
    upload.set_input_files(broken)
    page.get_by_text("broken.png cannot be read").wait_for()
    write_image(tmp_path / "good.png", (20, 20, 3))
    upload.set_input_files(tmp_path / "good.png")
    page.get_by_text("good.png: ").wait_for()
    page.locator("#maps .frame").nth(1).scroll_into_view_if_needed()
    _point(page, 7, 0, tap=True)
    _point(page, 0, 7, tap=True)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_two_look_at_images_and_the_checkpoint_vanishes(
    served: Served, open_page: Callable[..., Any]
) -> None:
    pages = open_page(served.url), open_page(served.url)
    for number, page in enumerate(pages):
        page.get_by_role("tab", name="Surprise").click()
        page.get_by_label("Number of a test image").fill(str(number))
        page.locator("#show-test").click()
    for number, page in enumerate(pages):
        page.get_by_text(f"digits/test/{number} ").wait_for()
        page.wait_for_selector("#expected svg")
    pages[0].close()
    page = pages[1]
    away = served.path.rename(served.path.with_name("away.ckpt"))
    try:
        page.locator("#maps .frame").nth(1).hover()
        page.get_by_text("does not exist").wait_for()
    finally:
        away.rename(served.path)
    _point(page, 0, 0)
    page.get_by_label("Number of a test image").fill("360")
    page.locator("#show-test").click()
    page.get_by_text("test image=360").wait_for()
    assert not served.studio.desk.turn.locked()


def test_runs_are_watched_while_they_train(
    served: Served, open_page: Callable[..., Any], tmp_path: Path
) -> None:
    runs = served.studio.runs
    make_run(runs / "first", lr=0.1)
    page, other = open_page(served.url), open_page(served.url, width=400)
    for each in (page, other):
        each.get_by_role("tab", name="Runs").click()
        each.locator("#curves img[alt*='first: finished']").wait_for()
        assert each.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    before = page.locator("#curves img").get_attribute("src")
    page.get_by_label("images", exact=True).check()
    page.locator("#curves img[alt*='against images']").wait_for()
    page.get_by_label("bits/dim", exact=True).check()
    # Another one begins, and is shown by itself.
    second = make_run(runs / "second", rows=[], summary={"state": "running"}, lr=0.2)
    metrics = MetricsFile(second)
    with claim_run_folder(second, resuming=True):
        for step in (9, 19):
            metrics.log_metrics({"train/bits_per_dim": 5 - step / 10}, step)
            page.locator(f"#curves img[alt*='second: running, {step + 1} steps']").wait_for()
        with metrics.path.open("a") as file:
            file.write("29")  # as a row that is being written
        page.get_by_text("2 runs in").wait_for()
        page.get_by_text("1 of them running").wait_for()
        page.get_by_role("cell", name="0.2", exact=True).wait_for()
        write_image(second / "samples" / "step-0000020-samples.png", (20, 20))
        page.locator("#grids img[alt='second: samples after 20 steps']").wait_for()
        assert "running, 20 steps" in page.locator("#curves img").get_attribute("alt")
    metrics.finalize("success")
    page.locator("#curves img[alt*='second: crashed']").wait_for()
    assert page.locator("#curves img").get_attribute("src") != before
    other.close()
    # It vanishes, and then all of them do.
    shutil.rmtree(second)
    page.get_by_text("1 run in").wait_for()
    away = runs.rename(tmp_path / "away")
    page.get_by_text("there are no runs in").wait_for()
    away.rename(runs)
    page.get_by_text("1 run in").wait_for()


def test_a_password_is_asked_for(tmp_path: Path) -> None:
    path = save_tiny_checkpoint(tmp_path / "tiny.ckpt")
    for served in _serve([path], tmp_path, password="secret"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{served.url}/config")
        for word, expected in (("wrong", 400), ("secret", 200)):
            body = f"username=me&password={word}".encode()
            try:
                status = urllib.request.urlopen(f"{served.url}/login", body).status
            except urllib.error.HTTPError as error:
                status = error.code
            assert status == expected


@pytest.mark.skipif(
    "IMAGEGEN_SCREENSHOTS" not in os.environ, reason="IMAGEGEN_SCREENSHOTS names no run"
)
@pytest.mark.parametrize(("name", "width"), [("wide", 1200), ("narrow", 400)])
def test_screenshots(open_page: Callable[..., Any], name: str, width: int) -> None:
    folder = PROJECT_ROOT / "docs/images"
    folder.mkdir(parents=True, exist_ok=True)
    run = Path(os.environ["IMAGEGEN_SCREENSHOTS"])
    for served in _serve([run, *shipped_models()], run.parent):
        page = open_page(served.url, width=width, height=760)
        stroke(page, (0.35, 0.3), (0.45, 0.1), (0.6, 0.15), (0.65, 0.4))
        page.get_by_role("button", name="Keep the top").click()
        page.locator("#complete").click()
        page.wait_for_selector("#completions [data-finished=True]")
        page.screenshot(path=folder / f"page-complete-{name}.png", full_page=True)
        page.get_by_role("tab", name="Draw").click()
        page.locator("#again").click()
        page.wait_for_selector("#files a")
        page.screenshot(path=folder / f"page-draw-{name}.png", full_page=True)
        page.get_by_role("tab", name="State").click()
        page.locator("#walk").click()
        page.get_by_text("step 64 of 64").wait_for()
        page.screenshot(path=folder / f"page-state-{name}.png", full_page=True)
        page.get_by_role("tab", name="Surprise").click()
        page.locator("#show-test").click()
        page.wait_for_selector("#expected svg")
        page.screenshot(path=folder / f"page-surprise-{name}.png", full_page=True)
        page.get_by_role("tab", name="Runs").click()
        page.wait_for_selector("#curves img")
        page.wait_for_selector("#grids img")
        page.screenshot(path=folder / f"page-runs-{name}.png", full_page=True)
        page.close()  # Runs would ask the server that ends.
