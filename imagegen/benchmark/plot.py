"""The plot of the scaling benchmark."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

PANELS = {
    "seconds": ("seconds a training step", 1.0),
    "peak_bytes": ("peak memory, MiB", 2.0**-20),
}
_MARKERS = "osD^v<>P"


def plot(result: Mapping[str, Any]) -> bytes | None:
    """Time and memory against the length, log-log, as a PNG.

    Args:
        result: what `scaling.json` holds.

    Returns:
        None where matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return None

    figure = Figure(figsize=(13, 6), dpi=110, layout="constrained")
    lengths = result["plan"]["lengths"]
    colors = matplotlib.colormaps["tab20"].colors  # type: ignore[attr-defined]
    for axes, (key, (label, unit)) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
        lines = []
        for index, each in enumerate(result["mechanisms"]):
            known = [(p["length"], unit * p[key]) for p in each["points"] if p[key]]
            softmax = each["name"] == "softmax"
            lines += axes.plot(
                [length for length, _ in known],
                [value for _, value in known],
                label=each["name"],
                color="black" if softmax else colors[index % len(colors)],
                linewidth=2.5 if softmax else 1.2,
                marker=_MARKERS[index % len(_MARKERS)],
                markersize=4,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=30)
        axes.minorticks_off()
        axes.set_xlabel("positions")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        _guide(axes, lengths)
    figure.legend(handles=lines, loc="outside right upper", fontsize="small")
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def _guide(axes: Any, lengths: list[int]) -> None:
    """Lines of slope 1 and 2 from the lowest left point of the panel."""
    low, high = axes.get_ylim()
    for power, text in ((1, "n"), (2, "n²")):
        values = [low * (length / lengths[0]) ** power for length in lengths]
        axes.plot(lengths, values, color="grey", linestyle=":", linewidth=1)
        shown = [(n, value) for n, value in zip(lengths, values, strict=True) if value <= high]
        axes.annotate(text, shown[-1], color="grey")
    axes.set_ylim(low, high)
