"""How long one waits on the page, in a real browser: what `imagegen page` shows, and when.

    python benchmarks/page.py [--ckpt models/mnist] [--repeats 5] [--out FILE.md]

needs `pip install -e '.[browser]'` and Debian's package chromium. A page is served and opened; a
stroke is drawn, its top half or all but a hole is kept, and *Complete* is pressed; the same with
*Draw*. The first time of each is not counted: it compiles. In the table are the seconds from the
press to the finished pictures as the browser shows them, how many different pictures were shown in
a second until then, and the seconds that `complete`, of an empty image, or `generate` takes for as
many in this process, without a page. Below it is the memory of this process after 20 completions
and after as many as asked.
"""

from __future__ import annotations

import argparse
import resource
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from imagegen.checkpoint.provenance import commit  # noqa: E402
from imagegen.commands.benchmark.common import spread  # noqa: E402
from imagegen.commands.benchmark.tables import ranged, rows  # noqa: E402
from imagegen.commands.page.page_options import PageOptions  # noqa: E402
from imagegen.commands.page.server import start, studios_of  # noqa: E402
from imagegen.commands.page.studio import Studio  # noqa: E402
from imagegen.core.machine import describe  # noqa: E402
from imagegen.data.regions import read_region  # noqa: E402
from imagegen.generation.sampling_loop import complete, generate  # noqa: E402
from imagegen.tracking.runs_table import RUNS  # noqa: E402

WAIT = 300_000
"""Milliseconds that anything may take."""

# The seconds from the click to the finished pictures, and how many others were seen before.
PRESS = """async ([button, place]) => {
  const seen = new Set(), result = document.querySelector(place);
  const finished = () => result.querySelector("a, [data-finished=True]");
  const before = finished();
  const begun = performance.now();
  return await new Promise((resolve) => {
    const observer = new MutationObserver(() => {
      if (finished() !== null && finished() === before) return;
      if (result.querySelector("img")) seen.add(result.innerHTML);
      if (finished() === null) return;
      observer.disconnect();
      resolve([(performance.now() - begun) / 1000, seen.size]);
    });
    observer.observe(result, { childList: true, subtree: true, attributes: true });
    document.querySelector(button).click();
  });
}"""
SAMPLES = """() => {
  window.pictures = new Set();
  const element = document.querySelector("#samples");
  new MutationObserver(() => {
    const image = element.querySelector("img");
    if (image) window.pictures.add(image.src);
  }).observe(element, { childList: true, subtree: true, attributes: true });
}"""


def serve(
    ckpts: Sequence[str], runs: Path = RUNS, password: str | None = None
) -> tuple[Studio, Any, str]:
    """Returns what draws with the first model, what serves the page, and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = PageOptions(tuple(ckpts), "127.0.0.1", port, password, "cpu", runs)
    studios = studios_of(options)
    return studios[0], start(studios, options), f"http://127.0.0.1:{port}"


def stroke(page: Any, *points: tuple[float, float]) -> None:
    """With the mouse, over shares of the canvas's width and height."""
    page.locator("canvas").hover()  # waits until it stays where it is, unlike the mouse
    box = page.locator("canvas").bounding_box()
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place, steps=8)
    page.mouse.up()


def press_complete(page: Any) -> Any:
    """Seconds and pictures, each time of another seed: the same pictures are not seen to come."""
    seed = page.get_by_label("Seed").first
    seed.fill(str(int(seed.input_value()) + 1))
    return page.evaluate(PRESS, ["#complete", "#completions"])


def measured(page: Any, studio: Studio, repeats: int) -> list[tuple[str, list[Any], list[float]]]:
    """What was done, the seconds and pictures of each press, the seconds without a page."""
    model = studio.loaded().model
    spec = model.spec
    image = np.zeros((1, *spec.shape), np.uint8)
    found = []

    def add(what: str, press: Callable[[], Any], alone: Callable[[], Any]) -> None:
        pressed, without = [], []
        for repeat in range(repeats + 1):
            one = press()
            started = time.perf_counter()
            alone()
            if repeat:
                pressed.append(one)
                without.append(time.perf_counter() - started)
        found.append((what, pressed, without))

    kept = {"top:0.5": "the top half kept", "hole:0.4": "all but a hole kept"}
    for word, said in kept.items():
        if word == "top:0.5":
            stroke(page, (0.3, 0.25), (0.7, 0.25), (0.45, 0.8))  # a seven
            page.get_by_role("button", name="Keep the top").click()
        else:
            page.get_by_role("button", name="Keep all").click()
            page.get_by_role("button", name="Erase").click()
            for y in np.linspace(0.32, 0.68, 10):
                stroke(page, (0.32, y), (0.68, y))
        visible = read_region(word).visible(spec.height, spec.width)[None]
        for number in (1, 4):
            page.get_by_label("Number of completions").fill(str(number))
            add(
                f"complete, {said}: {number}",
                lambda: press_complete(page),
                lambda number=number, visible=visible: complete(model, image, visible, number),
            )
    page.get_by_role("tab", name="Draw").click()
    page.evaluate(SAMPLES)

    def draw() -> tuple[float, int]:
        page.evaluate("() => window.pictures.clear()")
        seconds, _ = page.evaluate(PRESS, ["#again", "#files"])
        return seconds, page.evaluate("() => window.pictures.size")

    for number in (16, 64):
        page.get_by_label("Number of images").fill(str(number))
        add(f"draw {number}", draw, lambda number=number: list(generate(model, number)))
    return found


def memory(page: Any, completions: int, first: int = 20) -> tuple[float, float]:
    """MiB that are resident in this process after the first completions, and after all."""
    page.get_by_role("tab", name="Complete").click()
    page.get_by_role("button", name="Keep the top").click()
    page.get_by_label("Number of completions").fill("1")
    used = []
    for number in range(1, completions + 1):
        press_complete(page)
        if number in (first, completions):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            used.append(pages * resource.getpagesize() / 2**20)
    return used[0], used[-1]


def table(found: list[tuple[str, list[Any], list[float]]]) -> list[str]:
    """Medians, least and most."""
    lines = [["", "seconds on the page", "pictures a second", "seconds without a page"]]
    for what, pressed, without in found:
        rates = [number / seconds for seconds, number in pressed]
        columns = ([seconds for seconds, _ in pressed], rates, without)
        lines.append([what, *(ranged(spread(column)) for column in columns)])
    return rows(lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ckpt", default="models/mnist")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--completions", type=int, default=200)
    parser.add_argument("--out", type=Path)
    typed = parser.parse_args()
    from playwright.sync_api import sync_playwright

    studio, server, url = serve([typed.ckpt])
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.set_default_timeout(WAIT)
        page.goto(url)
        page.wait_for_selector("canvas[data-ready]")
        found = measured(page, studio, typed.repeats)
        before, after = memory(page, typed.completions)
        browser.close()
    server.close(verbose=False)
    machine = describe(torch.device("cpu"))
    head = f"`{typed.ckpt}`, {machine['processor']}, {machine['threads']} threads, {commit()}:"
    said = f"{before:.0f} MiB after 20 completions, {after:.0f} MiB after {typed.completions}."
    lines = [head, "", *table(found), "", said]
    print("\n".join(lines))
    if typed.out is not None:
        typed.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
