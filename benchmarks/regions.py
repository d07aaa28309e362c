"""What completing any region costs and gains, at equal time on two cores.

    python benchmarks/regions.py speed mnist --out FOLDER     (on an idle machine)
    python benchmarks/regions.py train mnist --out FOLDER --jobs 2
    python benchmarks/regions.py table mnist --out FOLDER
    python benchmarks/regions.py score mnist --out FOLDER

`score` tables the bits per hidden value of each row and region: of the first 1,000 test images
where each row knows them exactly, of the first 40 where one needs particles, which take seconds an
image. Scores of single images are kept in the run folders, so that an interrupted call continues.

Data that are not in the project's data folder: see `quality.py`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.quality import (
    COLOUR,
    DATA,
    FASHION,
    FASHION_DATA,
    MNIST,
    OURS,
    PHOTOGRAPHS,
    PHOTOGRAPHS_DATA,
    size_options,
)
from benchmarks.trainings import Table, folder_of, main

EXACT, PARTICLES = 1000, 40
"""Test images that are scored."""
REGIONS = ("top:0.5", "left:0.5", "bottom:0.5", "right:0.5", "hole:0.33", "strokes", "random:0.5")


def _rows(options: list[str]) -> dict[str, list[str]]:
    own = [*options, *size_options(128)]
    return {
        "raster": own,
        "any order": [*own, "model.order=any"],
        "any order, visible values not learned": [
            *own,
            "model.order=any",
            "model.visible_weight=0",
        ],
        "eight orientations": [*own, "model.orders=8"],
    }


TABLES = {
    "mnist": Table(_rows(OURS), MNIST, 1800.0, draws=0, root=DATA),
    "fashion-mnist": Table(_rows(OURS), FASHION, 900.0, draws=0, root=FASHION_DATA),
    "photographs": Table(
        _rows(COLOUR), PHOTOGRAPHS, 1800.0, images=1000, draws=0, root=PHOTOGRAPHS_DATA
    ),
}


def score(name: str, table: Table, out: Path, only: str | None) -> None:
    """Score the rows that have been trained, and print the table."""
    for seed in sorted({seed for row in table.rows for seed in table.seeds_of(row)}):
        found = {}
        for row in table.rows:
            folder = folder_of(out, name, row, seed)
            if (folder / "test.json").exists() and (only is None or only in row):
                found[row] = {region: scores_of(folder, region) for region in REGIONS}
        print(f"\nseed {seed}\n\n| | {' | '.join(REGIONS)} |\n|---|{'---|' * len(REGIONS)}")
        # The images that all rows have scores of, so that rows differ by what they know alone.
        common = {r: min(len(scores[r]) for scores in found.values()) for r in REGIONS if found}
        for row, scores in found.items():
            cells = (scores[region][: common[region]] for region in REGIONS)
            text = (f"{s.mean():.3f} ± {s.std(ddof=1) / len(s) ** 0.5:.3f}" for s in cells)
            print(f"| {row} | {' | '.join(text)} |")
        print(f"| images | {' | '.join(str(common[region]) for region in common)} |", flush=True)


def scores_of(run: Path, region: str) -> np.ndarray:
    """Bits per hidden value of the first test images, "n": kept in the run's folder."""
    import torch

    from imagegen.checkpoint.provenance import load_source
    from imagegen.checkpoint.training_data import dataset_of
    from imagegen.data.regions import read_region
    from imagegen.evaluation.hidden import score_region
    from imagegen.evaluation.scores import default_batch
    from imagegen.generation.turned import particles_for

    file = run / f"{region.replace(':', '-')}.npy"
    if file.exists():
        return np.load(file)
    loaded = load_source(run, torch.device("cpu")).loaded
    model, typed = loaded.model, read_region(region)
    images = dataset_of(loaded.metadata, {}, model.spec).split("test").images[:EXACT]
    visible = typed.visible(model.spec.height, model.spec.width)
    if particles_for(model, visible[None], None) is not None:
        images = images[:PARTICLES]
    scores, said = score_region(model, images, typed, None, None, default_batch(model))
    np.save(file, scores)
    print(f"{run.name}, {region}: {scores.mean():.4f}, {said}", file=sys.stderr, flush=True)
    return scores


if __name__ == "__main__":
    if sys.argv[1:2] == ["score"]:
        command = argparse.ArgumentParser(description="Score rows that have been trained.")
        command.add_argument("table", choices=sorted(TABLES))
        command.add_argument("--out", type=Path, required=True, help="folder of the runs")
        command.add_argument("--only", help="rows whose name contains this")
        given = command.parse_args(sys.argv[2:])
        score(given.table, TABLES[given.table], given.out.absolute(), given.only)
    else:
        main(TABLES, str(__doc__).splitlines()[0])
