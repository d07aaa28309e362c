"""What the site of mkdocs.yml shows: MkDocs calls the functions `on_…` here.

The site has the folders of the repository, README.md at the top, so that a link between two files
leads to the same place here and on GitHub, and no text is kept twice. A page for each attention
mechanism is made from its file in conf/attention/, its class, and tables in benchmarks/results/.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import yaml
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from imagegen.attention.base import AttentionState, CausalAttention
from imagegen.core.build import build

ROOT = Path(__file__).resolve().parents[1]
SHOWN = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Dockerfile", "data/README.md"),
    *("docs/**/*.md", "docs/**/*.png", "docs/*.svg", "docs/*.css", "examples/*"),
    *("benchmarks/results/**/*.md", "benchmarks/results/**/*.png"),
    *("models/*/*.md", "models/*/*.png"),
)
MECHANISMS = "docs/mechanisms"
RESULTS = ("mechanisms.md", "scaling/scaling.md", "stability.md")
"""Files in benchmarks/results/ with tables whose rows begin with the name of a mechanism."""
POSITIONS = (64, 784)
"""Those of 8×8 digits and of MNIST."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Lay out the files as in the repository, and add the pages that are made."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    for path in sorted({path for pattern in SHOWN for path in ROOT.glob(pattern)}):
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    for mechanism in mechanisms():
        name = f"{MECHANISMS}/{mechanism.name}.md"
        files.append(File.generated(config, name, content=mechanism.page()))
    config.nav = list(_expanded(config.nav or [], [file.src_uri for file in files]))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Add the table of all mechanisms to the page above theirs."""
    return markdown + overview() if page.file.src_uri == f"{MECHANISMS}/README.md" else markdown


def on_page_content(content: str, **_: Any) -> str:
    """Turn equations into MathML, which browsers show without a script."""
    inline = re.sub(
        r'<span class="arithmatex">\\\((.*?)\\\)</span>',
        lambda found: convert(html.unescape(found[1])),
        content,
        flags=re.DOTALL,
    )
    return re.sub(
        r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>',
        lambda found: convert(html.unescape(found[1]), display="block"),
        inline,
        flags=re.DOTALL,
    )


def _expanded(entries: list[Any], names: list[str]) -> Iterator[Any]:
    """Entries of the navigation, patterns replaced by the names that they match."""
    for entry in entries:
        if isinstance(entry, dict):
            yield {
                title: list(_expanded(below, names)) if isinstance(below, list) else below
                for title, below in entry.items()
            }
        elif "*" in entry:
            yield from sorted(name for name in names if fnmatch(name, entry))
        else:
            yield entry


@dataclass(frozen=True)
class Mechanism:
    """A file of conf/attention/ and its class.

    Attributes:
        name: as typed, `attention=name`.
        text: the file.
    """

    name: str
    text: str

    @property
    def comments(self) -> list[str]:
        """The lines above the options: what it is, and what it is good for."""
        return [line[2:] for line in self.text.splitlines() if line.startswith("# ")]

    @property
    def options(self) -> str:
        """The lines below them."""
        return re.sub(r"^# .*\n", "", self.text, flags=re.MULTILINE)

    def layers(self) -> list[CausalAttention[Any]]:
        """Those of the default model, for images of 28 columns."""
        model = yaml.safe_load((ROOT / "conf/model/default.yaml").read_text())
        sizes = {"d_model": model["d_model"], "n_heads": model["n_heads"], "row_length": 28}
        options = yaml.safe_load(self.text)
        return [
            build(options, CausalAttention, layer=layer, **sizes)
            for layer in range(model["n_layers"])
        ]

    def page(self) -> str:
        """Its page, as Markdown."""
        layers = self.layers()
        target = yaml.safe_load(self.text)["_target_"]
        states = {position: _states(layers, position) for position in POSITIONS}
        kinds = {type(state) for state in states[POSITIONS[0]]}
        paths = sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
        lines = [
            f"# {self.name}",
            "\n\n".join(self.comments),
            f"```\npython train.py attention={self.name}\n```",
            "## Equations",
            _docstring(target.rpartition(".")[0], heading=False),
            _docstring(target),
            "## Options",
            f"`conf/attention/{self.name}.yaml`, each as `attention.OPTION=VALUE`:",
            f"```yaml\n{self.options}```",
            "## State and its size",
            *(
                f"### {path.rpartition('.')[2]}\n\n{_docstring(path, heading=False)}"
                for path in paths
            ),
            self._sizes(layers, states),
            "## Cost and scores, measured",
            *self._measured(),
        ]
        return "\n\n".join(lines) + "\n"

    def _sizes(
        self, layers: list[CausalAttention[Any]], states: dict[int, list[AttentionState]]
    ) -> str:
        first, last = POSITIONS
        rows = []
        shown = set()
        for early, late in zip(states[first], states[last], strict=True):
            if type(early) in shown:
                continue
            shown.add(type(early))
            for field in fields(early):
                tensors = [getattr(state, field.name) for state in (early, late)]
                if all(isinstance(tensor, torch.Tensor) for tensor in tensors):
                    shapes = " | ".join(
                        " × ".join(map(str, tensor.shape[1:])) for tensor in tensors
                    )
                    kind = str(tensors[0].dtype).removeprefix("torch.")
                    rows.append(f"| {type(early).__name__}.{field.name} | {kind} | {shapes} |")
        sizes = " and ".join(
            f"{sum(map(_nbytes, states[position])):,} bytes after {position} positions"
            for position in POSITIONS
        )
        constant = all(layer.constant_state for layer in layers)
        return "\n".join(
            [
                f"| for one image | type | after {first} positions | after {last} |",
                "|---|---|---|---|",
                *rows,
                "",
                f"The states of the {len(layers)} layers of the default model take {sizes} in "
                f"all: {'they keep their size' if constant else 'they grow'}.",
            ]
        )

    def _measured(self) -> Iterator[str]:
        """Its rows of the tables of results, each with the heading above it."""
        found = False
        for name in RESULTS:
            text = (ROOT / "benchmarks/results" / name).read_text()
            title = text.splitlines()[0].removeprefix("# ")
            tables = list(_tables(text, self.name))
            if tables:
                found = True
                yield f"### {title}"
                yield f"Machine, commands and commits: [{name}](../../benchmarks/results/{name})."
                yield from tables
        if not found:
            yield "No table of [the results](../../benchmarks/results/mechanisms.md) names it yet."


def mechanisms() -> list[Mechanism]:
    """All of them, by name."""
    paths = sorted((ROOT / "conf/attention").glob("*.yaml"))
    return [Mechanism(path.stem, path.read_text()) for path in paths]


def overview() -> str:
    """A table with a row for each mechanism."""
    lines = ["", "", "| mechanism | what it is | state | bytes after 64 | after 784 |"]
    lines.append("|---|---|---|---:|---:|")
    for mechanism in mechanisms():
        layers = mechanism.layers()
        sizes = [sum(map(_nbytes, _states(layers, position))) for position in POSITIONS]
        constant = all(layer.constant_state for layer in layers)
        lines.append(
            f"| [{mechanism.name}]({mechanism.name}.md) | {' '.join(mechanism.comments)} "
            f"| {'constant' if constant else 'grows'} | {sizes[0]:,} | {sizes[1]:,} |"
        )
    return "\n".join(lines) + "\n"


def _states(layers: list[CausalAttention[Any]], positions: int) -> list[AttentionState]:
    """The states of one image after so many positions."""
    with torch.no_grad():
        return [layer(torch.randn(1, positions, layer.d_model))[1] for layer in layers]


def _nbytes(state: AttentionState) -> int:
    return sum(tensor.nbytes for tensor in state.tensors())


def _docstring(path: str, heading: bool = True) -> str:
    """A directive that shows the docstring of a class or module."""
    shown = str(heading).lower()
    return (
        f"::: {path}\n    options:\n      members: false\n      show_root_heading: {shown}\n"
        f"      show_root_toc_entry: {shown}"
    )


def _tables(text: str, name: str) -> Iterator[str]:
    """The tables of a file, each below its heading and with the rows of one mechanism only."""
    heading = ""
    for found in re.finditer(r"^#+ (.*)\n|(?:^\|.*\n)+", text + "\n", flags=re.MULTILINE):
        heading = found[1] or heading
        rows = found[0].splitlines()
        own = [row for row in rows[2:] if re.match(rf"\| *{name}(?!\w)", row)]
        if own:
            yield "\n".join([f"**{heading}**", "", *rows[:2], *own])
