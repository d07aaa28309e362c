"""Which small changes of the code the tests notice: a random sample of mutants, run one by one.

`python benchmarks/mutants.py --rooms attention heads generation --count 40` changes one operator,
comparison, constant or condition at a time, runs the tests of its room until the first failure, and
prints each mutant that no test noticed, as a line that `--only` takes to try it again with other
tests. The checkout must be clean; files are restored after each mutant.
"""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
TEXT = {
    **{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%"},
    **{ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="},
    **{ast.And: "and", ast.Or: "or"},
}


def mutants(path: Path) -> Iterator[tuple[int, int, str, str]]:
    """Line, column, text and its replacement, of every mutant of a file."""
    source = path.read_text()
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp | ast.Compare | ast.BoolOp):
            operator = node.ops[0] if isinstance(node, ast.Compare) else node.op
            left = node.values[0] if isinstance(node, ast.BoolOp) else node.left
            if isinstance(node, ast.BinOp):
                left = node.left
            if type(operator) not in OTHER or left.end_lineno is None:
                continue
            row, start = left.end_lineno - 1, left.end_col_offset or 0
            old = TEXT[type(operator)]
            found = lines[row].find(f" {old} ", start)
            if found >= 0:
                yield row, found + 1, old, TEXT[OTHER[type(operator)]]
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            old = ast.get_source_segment(source, node) or ""
            yield node.lineno - 1, node.col_offset, old, f"({old} + 1)"


def main() -> int:
    parser = argparse.ArgumentParser(description="Try a sample of mutants.")
    parser.add_argument("--rooms", nargs="+", default=["attention", "heads", "generation"])
    parser.add_argument("--count", type=int, default=40, help="mutants in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=300, help="seconds for one")
    parser.add_argument("--only", nargs="+", default=[], help="FILE:LINE:COLUMN:OLD:NEW")
    options = parser.parse_args()
    every = [
        (path, *mutant)
        for room in options.rooms
        for path in sorted((ROOT / "imagegen" / room).rglob("*.py"))
        for mutant in mutants(path)
    ]
    chosen = random.Random(options.seed).sample(every, min(options.count, len(every)))
    if options.only:
        chosen = [
            (ROOT / file, int(line) - 1, int(column), old, new)
            for file, line, column, old, new in (text.split(":", 4) for text in options.only)
        ]
    noticed = 0
    for number, (path, row, column, old, new) in enumerate(chosen, 1):
        source = path.read_text()
        lines = source.splitlines(keepends=True)
        line = lines[row]
        lines[row] = line[:column] + new + line[column + len(old) :]
        room = path.relative_to(ROOT / "imagegen").parts[0]
        begin = time.monotonic()
        try:
            path.write_text("".join(lines))
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "2", f"tests/{room}"]
            try:
                failed = subprocess.run(
                    command, cwd=ROOT, capture_output=True, timeout=options.limit
                ).returncode
            except subprocess.TimeoutExpired:
                failed = 1
        finally:
            path.write_text(source)
        noticed += bool(failed)
        name = f"{path.relative_to(ROOT)}:{row + 1}:{column}:{old}:{new}"
        seconds = time.monotonic() - begin
        print(f"{number} {'noticed' if failed else 'MISSED'} {name} ({seconds:.0f} s)", flush=True)
    print(f"{noticed} of {len(chosen)} noticed, of {len(every)} mutants in {options.rooms}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
