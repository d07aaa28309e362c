"""`imagegen benchmark peer`: ours against pytorch-fast-transformers, as ratios."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imagegen.cli.entry import hydra_entry
from imagegen.commands.benchmark import generate, train
from imagegen.commands.benchmark.common import ascending, ratio
from imagegen.commands.benchmark.contestants import PEER
from imagegen.commands.benchmark.generate import GenerateOptions
from imagegen.commands.benchmark.generate_report import at_batch, best_rate
from imagegen.commands.benchmark.peer_library import INSTALL, is_installed
from imagegen.commands.benchmark.tables import not_measured, ranged, rows, where
from imagegen.commands.benchmark.train import TrainOptions
from imagegen.core import values as opt
from imagegen.core.errors import UserError
from imagegen.core.files import staged_folder, write_atomic

if TYPE_CHECKING:
    from omegaconf import DictConfig

OWNED = ("peer.json", "peer.md")


def run(config: Mapping[str, Any]) -> dict[str, Any]:
    """Do what `conf/benchmark_peer.yaml` and the command line ask; print the table.

    Returns:
        what is written to `peer.json`.

    Raises:
        UserError: for anything that cannot be, such as a peer that is not installed or cannot be
        measured; then nothing is written.
    """
    plain = opt.plain(config)
    if not is_installed():
        raise UserError(INSTALL)
    drawing, training = _options(plain)
    out: Path = drawing.common.out
    device = opt.resolve_device(drawing.common.device)
    with staged_folder(out, owned=OWNED) as folder:
        drawn = generate.measured(drawing, device)
        trained = train.measured(training, device)
        found = ratios(drawn, trained)
        result = {"benchmark": "peer", "ratios": found, "generate": drawn, "train": trained}
        if not any(row["ratio"] for row in found):
            raise UserError(f"pytorch-fast-transformers gave no number: {_reason(drawn)}.")
        text = markdown(result)
        write_atomic(folder / "peer.json", json.dumps(result, indent=2) + "\n")
        write_atomic(folder / "peer.md", text)
    print(text)
    print(f"look at {out / 'peer.md'}")
    return result


def ratios(drawn: Mapping[str, Any], trained: Mapping[str, Any]) -> list[dict[str, Any]]:
    """How many times faster or smaller ours is.

    Args:
        drawn, trained: results of `generate` and `train`.
    """
    found = []

    def add(what: str, numbers: Sequence[Any], inverse: bool = False) -> None:
        ours, theirs = numbers
        value = None
        if ours and theirs:
            value = ratio(ours, theirs) if inverse else ratio(theirs, ours)
        found.append({"what": what, "ours": ours, "theirs": theirs, "ratio": value})

    drawers = {one["name"]: one for one in drawn["contestants"]}
    pair = [drawers[name] for name in ("linear", "peer_linear")]
    sizes = " against ".join(str(one["best_batch_size"]) for one in pair)
    add(
        f"images/s, best batch against best batch ({sizes})",
        [best_rate(one) for one in pair],
        inverse=True,
    )
    alone = [at_batch(one, 1) for one in pair]
    add("seconds per image, batch 1", [a and a["seconds_for_batch"] for a in alone])

    trainers = {one["name"]: one for one in trained["contestants"]}
    for index, size in enumerate(trained["plan"]["lengths"]):
        theirs = trainers["peer_linear"]["batches"][index]
        for name, what in (("linear_bf16", "bf16-mixed"), ("linear", "float32")):
            ours = trainers[name]["batches"][index]
            seconds = [each["seconds_a_step"] for each in (ours, theirs)]
            add(f"seconds a training step, batch {size}, {what}", seconds)
        ours = trainers["linear"]["batches"][index]
        peaks = [_single(each["peak_bytes"]) for each in (ours, theirs)]
        add(f"peak memory of a training step, MiB, batch {size}, float32", peaks)
    return found


def _single(size: int | None) -> dict[str, float] | None:
    """MiB, as a spread of one number."""
    return None if not size else dict.fromkeys(("median", "least", "most"), size / 2**20)


def _options(config: Mapping[str, Any]) -> tuple[GenerateOptions, TrainOptions]:
    sizes = ascending(config["batch_sizes"], "batch_sizes", "[1,64]")
    drawing = GenerateOptions.from_config(
        {
            **config,
            "contestants": ["linear", "peer_linear"],
            # Latency is that of one image.
            "batch_sizes": [1, *sizes],
        },
        "peer",
    )
    training = TrainOptions.from_config(
        {
            **config,
            "contestants": ["linear", "linear_bf16", "peer_linear"],
            "batch_sizes": config["train_batch_sizes"],
        },
        "peer",
    )
    return drawing, replace(training, common=replace(training.common, out=drawing.common.out))


def _reason(drawn: Mapping[str, Any]) -> str:
    reasons = {
        str(batch["not_measured"])
        for one in drawn["contestants"]
        for batch in one["batches"]
        if batch["not_measured"]
    }
    return "; ".join(sorted(reasons))


def markdown(result: Mapping[str, Any]) -> str:
    """Ratios, and why some are missing."""
    drawn, trained = result["generate"], result["train"]
    table = [["", "ours", PEER, "ratio"]]
    for row in result["ratios"]:
        numbers = [ranged(row["ours"]), ranged(row["theirs"])]
        times = "–" if row["ratio"] is None else "×" + ranged(row["ratio"])
        table.append([row["what"], *numbers, times])
    lines = [
        f"# Beside {PEER}",
        "",
        f"{drawn['sentence']}; {drawn['costs']['length']:,} steps per image; {where(drawn)}",
        "",
        "Ours: linear attention, drawn as imagegen sample draws and trained as imagegen train "
        "trains. Theirs: "
        "recurrent linear attention, and causal-linear attention for training, at the same sizes. "
        "In turn in one run; medians, in brackets from the least to the most; of a ratio the "
        "widest range that the repeats allow.",
        "",
        *rows(table),
    ]
    lines += not_measured(
        (one["title"], batch["batch_size"], batch["not_measured"])
        for one in (*drawn["contestants"], *trained["contestants"])
        for batch in one["batches"]
    )
    return "\n".join(lines) + "\n"


@hydra_entry("benchmark_peer")
def main(config: DictConfig) -> None:
    """Command-line entry."""
    run(config)
