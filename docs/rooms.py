"""Draw the rooms of the package and the imports between them: `make drawing` writes docs/rooms.svg.

Rooms are in the order of the import-linter contract in pyproject.toml. An arc at the right leads
down to what a room imports, as wide as there are importing modules; one at the left would lead up.
"""

from __future__ import annotations

import sys
import textwrap
from html import escape
from pathlib import Path

import grimp

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
WIDTH, ROW, LEFT, BOX = 1180, 78, 40, 760


def rooms() -> list[str]:
    """Names of the rooms, the upper ones first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers: list[str] = project["tool"]["importlinter"]["contracts"][0]["layers"]
    return layers


def imports(names: list[str]) -> dict[tuple[str, str], int]:
    """How many modules of a room import from another one, by (room, other)."""
    graph = grimp.build_graph("imagegen", exclude_type_checking_imports=True, cache_dir=None)
    found: dict[tuple[str, str], set[str]] = {}
    for module in graph.modules:
        for other in graph.find_modules_directly_imported_by(module):
            pair = tuple(f"{each}.".split(".")[1] for each in (module, other))
            if pair[0] != pair[1] and set(pair) <= set(names):
                found.setdefault((pair[0], pair[1]), set()).add(module)
    return {pair: len(modules) for pair, modules in found.items()}


def draw(names: list[str], arcs: dict[tuple[str, str], int]) -> str:
    """The drawing as SVG."""
    place = {name: 20 + ROW * index for index, name in enumerate(names)}
    parts = []
    for name, top in place.items():
        files = sorted((ROOT / "imagegen" / name).rglob("*.py"))
        lines = sum(len(path.read_text().splitlines()) for path in files)
        inside = sorted({path.relative_to(ROOT / "imagegen" / name).parts[0] for path in files})
        modules = "  ".join(part.removesuffix(".py") for part in inside if part[0] != "_")
        texts = "".join(
            f'<text x="{LEFT + 12}" y="{top + 38 + 15 * i}" font-size="11">{escape(text)}</text>'
            for i, text in enumerate(textwrap.wrap(modules, 122))
        )
        parts.append(
            f'<rect x="{LEFT}" y="{top}" width="{BOX}" height="{ROW - 14}" rx="6" '
            'fill="#f4f6f8" stroke="#5b6b7b"/>'
            f'<text x="{LEFT + 12}" y="{top + 20}" font-weight="bold">{name}</text>'
            f'<text x="{LEFT + BOX - 12}" y="{top + 20}" text-anchor="end" fill="#5b6b7b">'
            f"{len(files)} files, {lines:,} lines</text>"
            f"{texts}"
        )
    for (room, other), count in sorted(arcs.items()):
        down = place[other] > place[room]
        start, end = place[room] + 16, place[other] + 30
        edge, away = (LEFT + BOX, 1) if down else (LEFT, -1)
        bend = edge + away * (24 + 30 * abs(names.index(other) - names.index(room)))
        colour = "#3b7dd8" if down else "#c62828"
        parts.append(
            f'<path d="M {edge} {start} C {bend} {start}, {bend} {end}, {edge} {end}" fill="none" '
            f'stroke="{colour}" stroke-width="{min(5, 0.7 + count / 5):.1f}" opacity="0.55" '
            'marker-end="url(#tip)"/>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{30 + ROW * len(names)}" '
        'font-family="sans-serif" font-size="13">'
        '<defs><marker id="tip" markerWidth="7" markerHeight="7" refX="6" refY="3" orient="auto" '
        'markerUnits="userSpaceOnUse"><path d="M0,0 L7,3 L0,6 z" fill="#3b7dd8"/></marker></defs>'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def main() -> int:
    """Write the drawing; returns 1 where an import leads up."""
    names = rooms()
    arcs = imports(names)
    (ROOT / "docs" / "rooms.svg").write_text(draw(names, arcs))
    up = [pair for pair in arcs if names.index(pair[0]) > names.index(pair[1])]
    print(f"docs/rooms.svg: {len(names)} rooms, {len(arcs)} arrows, {len(up)} of them up")
    return bool(up)


if __name__ == "__main__":
    sys.exit(main())
