"""The documents: links lead somewhere, commands are accepted, code runs, and the site builds."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from imagegen.cli.entry import compose, quoted
from imagegen.commands import registry
from imagegen.core.installation import PROJECT_ROOT, shipped_models
from imagegen.core.spec import ImageSpec
from tests.helpers import SMALL, run_main, save_tiny_checkpoint, tiny_model, write_image

PAGES = {
    path.relative_to(PROJECT_ROOT).as_posix(): path.read_text()
    for pattern in (
        "*.md",
        "data/*.md",
        "docs/**/*.md",
        "benchmarks/results/**/*.md",
        "models/*/*.md",
    )
    for path in sorted(PROJECT_ROOT.glob(pattern))
}
MANUALS = [name for name in PAGES if not name.startswith(("benchmarks/", "CHANGELOG"))]
"""Pages whose commands are of today; results keep those that were typed."""
TUTORIALS = [name for name in PAGES if name.startswith("docs/tutorials/")]
NOTEBOOKS = sorted(path.name for path in (PROJECT_ROOT / "examples").glob("*.ipynb"))
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
SPAN = re.compile(r"`((?:python train\.py|python sample\.py|imagegen) [^`…]+)`")
EXAMPLE = "attention=min_gru"
"""The mechanism of CONTRIBUTING.md, which tests/test_contributing.py trains."""
SLOW = {"benchmark", "verify", "format=onnx", "examples/generate_onnx.py"}
"""Words of commands that take long and have tests of their own."""
SHORTER = {"size=32": "size=4", "max_epochs=.*": "max_epochs=1", "seed=0,1,2": "seed=0,1"}
"""What is made of the options of trainings, beside `SMALL`."""
CONFIGS = {"find-lr": "train", "benchmark": "benchmark_{}"}
"""Names of configurations that are not those of their commands."""


@dataclass(frozen=True)
class Block:
    """A fenced part of a page: shell commands where no language is named."""

    language: str
    text: str

    def commands(self) -> Iterator[list[str]]:
        """The words of each line, without comments and variables set before a command."""
        for line in self.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words:
                yield words


def blocks(page: str) -> list[Block]:
    return [Block(found[2], found[3]) for found in FENCE.finditer(PAGES[page])]


def prose(page: str) -> str:
    """A page without code, in which brackets are not links."""
    return re.sub(r"`[^`\n]*`", "`code`", FENCE.sub("", PAGES[page]))


def anchors(page: str) -> set[str]:
    """Those that GitHub and MkDocs give the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", PAGES[page]), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (PROJECT_ROOT / page).parent / path if path else PROJECT_ROOT / page
        name = target.resolve().relative_to(PROJECT_ROOT).as_posix()
        if not target.exists() or (anchor and anchor not in anchors(name)):
            broken.append(link)
    assert broken == []


def typed(page: str) -> Iterator[list[str]]:
    """The commands on a page, of blocks and in sentences: name of the command and options."""
    spans = (Block("", found[1]) for found in SPAN.finditer(FENCE.sub("", PAGES[page])))
    for block in (*blocks(page), *spans):
        if block.language in ("", "bash"):
            for words in block.commands():
                known = as_command(words)
                if known is not None:
                    yield known


def as_command(words: list[str]) -> list[str] | None:
    """A line as words behind `imagegen`; None for other programs."""
    for place, word in enumerate(words):
        if word in ("train.py", "sample.py"):
            return [word.removesuffix(".py"), *words[place + 1 :]]
    return words[1:] if words[0] == "imagegen" and len(words) > 1 else None


def test_commands_are_accepted() -> None:
    """Every command on a page is one, and its options are options."""
    seen: set[tuple[str, ...]] = set()
    for page in MANUALS:
        for name, *options in typed(page):
            if name == "--help":
                continue
            assert name in registry.COMMANDS, page
            config = CONFIGS.get(name, name)
            if name == "benchmark":
                config = config.format(options.pop(0))
            # Of a sweep, the first value of each; engines need packages that may be missing.
            overrides = [
                quoted(re.sub(r"^([\w.]+=[^\[,]*),[^\[]*$", r"\1", option))
                for option in options
                if "=" in option and not option.startswith(("hydra.", "sweep=", "--"))
            ]
            if EXAMPLE in options:
                continue
            if registry.COMMANDS[name].hydra and (config, *overrides) not in seen:
                seen.add((config, *overrides))
                try:
                    compose(config, overrides)
                except Exception as error:
                    pytest.fail(f"{page}: {name} {' '.join(options)}: {error}")
    assert len(seen) > 50


@pytest.mark.parametrize("folder", shipped_models(), ids=lambda folder: folder.name)
def test_a_card_trains_the_model_that_ships(folder: Path) -> None:
    page = (folder / "README.md").relative_to(PROJECT_ROOT).as_posix()
    ((_, *options),) = [command for command in typed(page) if command[0] == "train"]
    overrides = [quoted(option) for option in options if not option.startswith("hydra.")]
    composed = OmegaConf.to_container(compose("train", overrides))
    assert isinstance(composed, dict)
    shipped = json.loads((folder / "config.json").read_text(encoding="utf-8"))["config"]
    for part in ("model", "attention", "head", "optimizer", "scheduler", "dataset", "trainer"):
        for name, value in shipped[part].items():
            # Folders and the kind of number are those of the machine.
            if name not in ("root", "precision", "default_root_dir"):
                assert composed[part].get(name) == value, f"{part}.{name}"
    assert composed["batch_size"] == shipped["batch_size"]


def prepared(page: str, folder: Path) -> dict[str, Any]:
    """What the Python code of a page that is not a tutorial takes for granted."""
    if page == "README.md":
        save_tiny_checkpoint(folder / "demo/run/checkpoints/best.ckpt")
    spec = ImageSpec(**{"height": 8, "width": 8, "levels": 17})
    images = np.random.default_rng(0).integers(0, 17, (2, 8, 8, 1)).astype(np.uint8)
    if page == "docs/regions.md":
        embedding = {
            "_target_": "imagegen.model.embeddings.Neighbourhood",
            "neighbours": [[0, -1], [-1, 0]],
        }
        model = tiny_model(spec, order="any", embedding=embedding, tokens="pixel")
        return {
            **{"torch": torch, "model": model, "images": torch.from_numpy(images)},
            **{"height": 8, "width": 8, "kept": 0},
        }
    if page == "docs/surprise.md":
        return {"model": tiny_model(ImageSpec(16, 16, 1, 17)), "images": np.tile(images, (2, 2, 1))}
    return {}


@pytest.mark.parametrize(
    "page",
    [
        name
        for name in MANUALS
        # Its code is a file of the package, which tests/test_contributing.py checks.
        if name not in ("CONTRIBUTING.md", *TUTORIALS)
        and any(block.language == "python" for block in blocks(name))
    ],
)
def test_code_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = prepared(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        if block.language == "python":
            exec(compile(block.text, page, "exec"), names)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """Runs a command of a page in this process, trainings small, in a folder with some images."""
    for index in range(40):
        write_image(tmp_path / "PHOTOS" / f"{index}.png", (8, 8, 3), seed=index)
    monkeypatch.chdir(tmp_path)

    def shell(words: list[str]) -> None:
        if SLOW & {*words}:
            return
        name, *options = as_command(words) or pytest.fail(f"no command of ours: {words}")
        if name == "train":
            given = {option.partition("=")[0] for option in options}
            options += [option for option in SMALL if option.partition("=")[0] not in given]
            if "dataset=image_folder" in options:
                options.append(f"dataset.cache={tmp_path / 'cache'}")
            for long, short in SHORTER.items():
                options = [re.sub(long, short, option) for option in options]
        assert run_main(monkeypatch, registry.main, "imagegen", name, *options) == 0, words

    return shell


@pytest.mark.parametrize("page", TUTORIALS)
def test_tutorials_work(
    page: str, shell: Callable[[list[str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks of a page, in their order."""
    names: dict[str, Any] = {}
    for block in blocks(page):
        assert block.language in ("", "python"), page
        if block.language == "python":
            exec(compile(block.text, page, "exec"), names)
            continue
        for words in block.commands():
            shell(words)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_work(
    name: str, shell: Callable[[list[str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every cell of code, in order; what they start is run in this process, smaller."""

    started = subprocess.run

    def run(words: list[str], **options: Any) -> object:
        if words[:3] != [sys.executable, "-m", "imagegen"]:
            return started(words, **options)
        return shell(["imagegen", *words[3:]])

    notebook = json.loads((PROJECT_ROOT / "examples" / name).read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    monkeypatch.setattr(subprocess, "run", run)
    names: dict[str, Any] = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), name, "exec"), names)


# mkdocs and what it brings warn of each other.
@pytest.mark.filterwarnings("ignore")
def test_the_site_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    monkeypatch.chdir(PROJECT_ROOT)
    build(load_config("mkdocs.yml", strict=True, site_dir=str(tmp_path)))
    built = {
        path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.html")
    }
    mechanisms = {path.stem for path in (PROJECT_ROOT / "conf/attention").glob("*.yaml")}
    folder = "docs/mechanisms/"
    made = {name[len(folder) : -5] for name in built if name.startswith(folder)}
    assert made == mechanisms | {"index"}
    # Scores as they are in the results.
    (row,) = re.findall(
        r"^\| gla \| (\S+ ± \S+) .*$",
        PAGES["benchmarks/results/mechanisms.md"].split("## MNIST")[0],
        re.M,
    )
    assert row in built[f"{folder}gla.html"]
    assert "<math" in built["docs/tutorials/student.html"]
    for name, text in built.items():
        assert "arithmatex" not in text, name
        assert (
            re.findall(r"<(?:script|img|link)[^>]+(?:src|href)=.?(?:https?:)?//[^>]*>", text) == []
        )
