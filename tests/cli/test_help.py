"""A command's help is made from the comments of its file."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig

from imagegen.cli.entry import PROJECT_ROOT, compose
from imagegen.cli.help import described, options_of

FILES = sorted(
    path
    for path in (PROJECT_ROOT / "conf").glob("*.yaml")
    if "${options:" in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_option_is_described_with_its_default(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert f"${{options:{path.stem}}}" in text
    config = compose(path.stem)
    options = [option for option in options_of(text) if option[0]]
    assert all(what for _, _, what in options)
    names = set()
    for name, value in config.items():
        if isinstance(value, DictConfig):
            if text.partition("hydra:")[0].count(f"\n  - {name}: "):
                continue  # a group, told of before the options
            names |= {f"{name}.{inner}" for inner in value}
        else:
            names.add(str(name))
    assert {name for name, _, _ in options} == names
    assert max(map(len, described(text).replace("$$", "$").splitlines())) <= 100


def test_what_an_option_looks_like() -> None:
    text = (
        "# a command\n\ndefaults:\n  - _self_\n\n"
        "rows: [1, 2]  # how many rows,\n              # at $HOME\n"
        "\n# More:\nmore:\n  rows: null  # others # and more\n\nhydra:\n  none: of this\n"
    )
    assert described(text).splitlines() == [
        "  rows       how many rows, at $$HOME (default [1,2])",
        "",
        "More:",
        "  more.rows  others # and more",
    ]


def test_every_command_of_options_has_its_help_made() -> None:
    assert len(FILES) == 11
