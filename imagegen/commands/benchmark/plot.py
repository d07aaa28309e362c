"""The plots of the benchmarks."""

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
    figure = _figure()
    if figure is None:
        return None
    from matplotlib import colormaps

    lengths = result["plan"]["lengths"]
    colors = colormaps["tab20"].colors  # type: ignore[attr-defined]
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
    return _png(figure)


def plot_generation(result: Mapping[str, Any]) -> bytes | None:
    """Time of a step against its position, and images/s against the batch size, as a PNG.

    Args:
        result: what `generate.json` holds.

    Returns:
        None where matplotlib is not installed.
    """
    figure = _figure()
    if figure is None:
        return None
    time, rate = figure.subplots(1, 2)
    batch_sizes = result["plan"]["lengths"]
    middles = [position + (result["steps"] + 1) / 2 for position in result["positions"]]
    lines = []
    for index, one in enumerate(result["contestants"]):
        style: dict[str, Any] = {
            "color": f"C{index}",
            "linewidth": 1.5,
            "linestyle": "--" if one["form"] == "peer" else "-",
            "marker": _MARKERS[index % len(_MARKERS)],
            "markersize": 4,
        }
        first = one["batches"][0]
        if first["images_per_second"]:
            ms = [at["median"] for at in first["ms_a_step_at"]]
            time.plot(middles, ms, **style)
        known = [
            (batch["batch_size"], batch["images_per_second"])
            for batch in one["batches"]
            if batch["images_per_second"]
        ]
        medians = [each["median"] for _, each in known]
        lines += rate.plot([size for size, _ in known], medians, label=one["title"], **style)
        rate.fill_between(
            [size for size, _ in known],
            [each["least"] for _, each in known],
            [each["most"] for _, each in known],
            color=style["color"],
            alpha=0.15,
        )
    time.set_xlabel("position")
    time.set_ylabel(f"milliseconds per step, batch {batch_sizes[0]:,}")
    rate.set_xlabel("images at a time")
    rate.set_ylabel("images per second")
    rate.set_xscale("log", base=2)
    rate.set_xticks(batch_sizes, [f"{size:,}" for size in batch_sizes])
    for axes in (time, rate):
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    figure.legend(handles=lines, loc="outside right upper", fontsize="small")
    return _png(figure)


def _figure() -> Any:
    """Room for two panels; None where matplotlib is not installed."""
    try:
        # Named first: a part that is loaded already would be found without the package.
        import matplotlib  # noqa: F401
        from matplotlib.figure import Figure
    except ImportError:
        return None
    return Figure(figsize=(13, 6), dpi=110, layout="constrained")


def _png(figure: Any) -> bytes:
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
