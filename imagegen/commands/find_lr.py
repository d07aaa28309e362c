"""Look for a learning rate: `imagegen find-lr` with the options of training."""

from __future__ import annotations

import sys

from omegaconf import DictConfig

from imagegen.cli.entry import hydra_entry
from imagegen.core.installation import typed

ROWS = 15

USAGE = """\
Look for a learning rate: train for 100 steps while it grows, and see where the loss falls fastest.

  {find_lr} dataset=mnist model.d_model=256 batch_size=32

takes the options of training ({train} --help); logger, callbacks, limits, resume, on_nan
and the run folder do nothing.
Where an optimizer has several rates, as muon, they grow together in the ratio that they have."""


def _run(cfg: DictConfig) -> None:
    from imagegen.training.learning_rate import find

    found, suggested = find(cfg)
    print("learning rate   bits/dim, smoothed")
    for rate, loss in found[:: max(1, len(found) // ROWS)]:
        print(f"{rate:13.2e}   {loss:.4f}")
    options = " ".join(f"optimizer.{name}={rate:.2g}" for name, rate in suggested.items())
    print(f"suggested: {options} (where the loss falls fastest)")


_ENTRY = hydra_entry(
    "train",
    # Nothing is left on disk: no run folder, no log.
    rewrite=lambda typed: [
        *typed,
        "hydra.run.dir=.",
        "hydra.output_subdir=null",
        "hydra/job_logging=none",
    ],
)(_run)


def main() -> None:
    """Command-line entry."""
    if any(word in ("--help", "-h") for word in sys.argv[1:]):
        print(USAGE.format(find_lr=typed("find-lr"), train=typed("train")))
    else:
        _ENTRY()
