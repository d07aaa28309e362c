"""The two ways in CONTRIBUTING.md, that of a training pixel and that of a generated one, traced.

A way starts with the file of the command and goes down the stack of calls to the step: of training,
from a batch to its loss; of drawing, from the model's state to the levels of one step. The files of
the package on that stack, and those in which functions run during the step, in the order of their
first calls, are the way of a pixel.
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from omegaconf import OmegaConf

from imagegen.cli.entry import compose
from imagegen.commands import sample
from imagegen.core.build import build
from imagegen.core.installation import PACKAGE, PROJECT_ROOT
from imagegen.data.base import ImageDataset
from imagegen.model.transformer import ImageTransformer
from imagegen.training.model_options import model_options
from imagegen.training.module import ImageModule
from tests.helpers import DIGITS, SMALL, run_train, save_tiny_checkpoint

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

GUIDE = (PROJECT_ROOT / "CONTRIBUTING.md").read_text()
MOST = 12
"""Files of a way: more than this, and they are put together or the way is made shorter."""


class Way:
    """Traces one step on the way of a pixel, from the call of one function to a return.

    Args:
        owner, first: class and method whose call begins the step.
        last: file and function whose return ends it.
        skipped: how many calls of `first` come before that.

    Attributes:
        functions: those called on the way, by their file, both in the order of the first calls.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        owner: type,
        first: str,
        last: tuple[str, str],
        skipped: int = 0,
    ) -> None:
        self.last, self.skipped = last, skipped
        self.functions: dict[str, list[str]] = {}
        original = getattr(owner, first)

        @functools.wraps(original)
        def traced(*args: Any, **options: Any) -> Any:
            self.skipped -= 1
            if self.skipped == -1:
                for place in reversed(_stack(sys._getframe())):
                    self._note(place)
                sys.setprofile(self._profile)
            return original(*args, **options)

        monkeypatch.setattr(owner, first, traced)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        place = _place(frame.f_code)
        if place is not None and event == "call":
            self._note(place)
        elif event == "return" and place == self.last:
            sys.setprofile(None)

    def _note(self, place: tuple[str, str]) -> None:
        names = self.functions.setdefault(place[0], [])
        if place[1] not in names:
            names.append(place[1])


@functools.cache
def _place(code: CodeType) -> tuple[str, str] | None:
    """File and function, where these are the package's."""
    path = Path(code.co_filename)
    if PACKAGE not in path.parents:
        return None
    return path.relative_to(PACKAGE).as_posix(), code.co_name


def _stack(frame: FrameType) -> list[tuple[str, str]]:
    """The package's calls from the innermost out to the command's own."""
    found: list[tuple[str, str]] = []
    caller: FrameType | None = frame
    while caller is not None:
        place = _place(caller.f_code)
        if place is not None:
            found.append(place)
            if place[0].startswith("commands/"):
                return found
        caller = caller.f_back
    raise AssertionError(f"no command calls {found}")


def _listed(title: str) -> dict[str, list[str]]:
    """The functions that CONTRIBUTING.md lists under a title, by their file."""
    section = GUIDE.split(f"#### {title}\n", 1)[1].split("\n#", 1)[0]
    lines = re.findall(r"^\d+\. `([\w/]+\.py)`: (.*(?:\n   .*)*)", section, re.M)
    return {file: re.findall(r"`(\w+)`", functions) for file, functions in lines}


def _assert_listed(way: dict[str, list[str]], title: str) -> None:
    listed = _listed(title)
    assert list(listed) == list(way)
    assert len(way) <= MOST
    for file, functions in listed.items():
        assert functions, f"{file} lists no function"
        assert set(functions) <= set(way[file])


def test_the_way_of_a_training_pixel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = ("training/module.py", "training_step")
    way = Way(monkeypatch, ImageModule, "training_step", last)
    options = ["logger=none", "trainer=cpu", "+trainer.fast_dev_run=1"]
    assert run_train(monkeypatch, *options, f"hydra.run.dir={tmp_path / 'run'}") == 0
    _assert_listed(way.functions, "A training pixel")


def test_the_way_of_a_generated_pixel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = compose("train", SMALL)
    options = model_options(OmegaConf.to_container(trained), build(DIGITS, ImageDataset))
    checkpoint = save_tiny_checkpoint(tmp_path / "digits.ckpt", **options)
    # The first step knows no levels before it.
    way = Way(monkeypatch, ImageTransformer, "step", ("heads/base.py", "sample"), skipped=1)
    sample.main(compose("sample", [f"ckpt={checkpoint}", f"out={tmp_path / 'out'}", "n=1"]))
    _assert_listed(way.functions, "A generated pixel")


def test_every_room_has_a_line_in_the_order_of_the_layers() -> None:
    project = tomllib.loads((PROJECT_ROOT / "pyproject.toml").read_text())
    (contract,) = project["tool"]["importlinter"]["contracts"]
    section = GUIDE.split("## Where things live\n", 1)[1].split("\n## ", 1)[0]
    assert re.findall(r"^\| `(\w+)/` \|", section, re.M) == contract["layers"]
    assert "](docs/rooms.svg)" in section
    assert (PROJECT_ROOT / "docs" / "rooms.svg").is_file()
