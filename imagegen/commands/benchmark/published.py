"""What Katharopoulos et al. (2020) report for the models that are measured here.

Tables 1 and 2: images/s on a GPU, at batch sizes that differ; table 4: the same with the stateful
softmax of the supplement; table 5: seconds an image at batch size 1.
"""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """A row of the paper.

    Attributes:
        name: as the paper has it.
        ours: the contestant that it is held against; None where there is none.
        images_per_second: tables 1, 2 and 4.
        cpu, gpu: seconds an image at batch size 1, table 5.
    """

    name: str
    ours: str | None
    images_per_second: float
    cpu: float
    gpu: float


PUBLISHED = {
    "mnist": (
        Published("softmax", "softmax_recomputed", 0.45, 72.6, 10.2),
        Published("stateful-softmax", "softmax", 7.56, 7.4, 10.4),
        Published("LSH-1", None, 0.68, 46.0, 19.2),
        Published("LSH-4", None, 0.27, 112.0, 55.8),
        Published("linear", "linear", 142.8, 5.5, 7.3),
    ),
    "cifar10": (
        Published("softmax", "softmax_recomputed", 0.004, 8651.0, 300.0),
        Published("stateful-softmax", "softmax", 0.32, 71.9, 70.4),
        Published("LSH-1", None, 0.015, 2319.0, 222.0),
        Published("LSH-4", None, 0.005, 5264.0, 684.0),
        Published("linear", "linear", 17.85, 45.1, 61.3),
    ),
}

DIFFERENCES = {
    "images/s": "theirs on a GPU, each row at a batch size of its own; ours on the machine named "
    "above, at its best batch size. Theirs is PyTorch code, float32 by default; our weights are "
    "16-bit whole numbers where the processor has instructions for them (`precision=auto`).",
    "seconds an image, CPU": "one image at a time on either side, on different CPUs.",
    "seconds an image, GPU": "one image at a time on either side, on different GPUs.",
}
"""What differs, a line for each kind of number."""
