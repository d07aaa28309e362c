"""The options of `sample.py`, checked as far as can be without the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imagegen import options as opt
from imagegen.errors import UserError

TASKS = ("sample", "complete")


@dataclass(frozen=True)
class SampleOptions:
    """What to draw and where, checked as far as can be without the checkpoint.

    Attributes:
        out: absolute path of the folder to write.
        n: number of images; for a completion, of images to complete (None: all in `images`).
        images: files and folders to complete; None takes them from the data set's test split.
        visible: share of the rows that is kept, one for all images or a list of one for each.
        visible_rows: the same as a number of rows; replaces `visible`.
        completions: continuations of each image.
        dataset: options of the checkpoint's data set to replace.
    """

    task: str
    ckpt: str
    out: Path
    n: int | None = None
    seed: int = 0
    temperature: float = 1.0
    batch_size: int | None = None
    device: str = "auto"
    images: tuple[Path, ...] | None = None
    visible: float | tuple[float, ...] = 0.5
    visible_rows: int | tuple[int, ...] | None = None
    completions: int = 4
    resize: bool = False
    dataset: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SampleOptions:
        """Check the plain values of `conf/sample.yaml`.

        Raises:
            UserError: naming the first option that cannot be.
        """
        task = opt.choice(config["task"], "task", TASKS)
        if task == "sample":
            for name in ("images", "visible", "visible_rows", "completions"):
                if config[name] is not None:
                    raise UserError(f"{name} has no meaning in task=sample; add task=complete.")
        temperature = opt.temperature_value(config["temperature"])
        completions = config["completions"]
        if completions is None:
            # Greedy completions of one image are all the same.
            completions = 4 if temperature > 0 else 1
        return cls(
            task=task,
            ckpt=opt.checkpoint_path(config["ckpt"]),
            out=opt.out_folder(config["out"], "samples"),
            n=opt.optional_whole_number(config["n"], "n", 1),
            seed=opt.whole_number(config["seed"], "seed", 0, opt.MAX_SEED),
            temperature=temperature,
            batch_size=opt.optional_whole_number(config["batch_size"], "batch_size", 1),
            device=str(config["device"]),
            images=_image_paths(config["images"]),
            completions=opt.whole_number(completions, "completions", 1),
            resize=opt.flag(config["resize"], "resize"),
            dataset=config["dataset"] or {},
            **_visible(config["visible"], config["visible_rows"]),
        )


def _image_paths(value: object) -> tuple[Path, ...] | None:
    if value is None:
        return None
    values = opt.as_list(value)
    paths = [str(path) for path in ([value] if values is None else values)]
    if not paths or not all(path.strip() for path in paths):
        raise UserError("images is empty; give an image file, a folder, or a list of them.")
    return tuple(opt.absolute(path) for path in paths)


def _visible(visible: object, visible_rows: object) -> dict[str, Any]:
    """Checked `visible` and `visible_rows`; a list stays one, as a tuple."""
    if visible is not None and visible_rows is not None:
        raise UserError("visible and visible_rows are both given; choose one.")
    check: Callable[[object], float]
    if visible_rows is not None:
        name, value, check = "visible_rows", visible_rows, _row_number
    elif visible is not None:
        name, value, check = "visible", visible, _share
    else:
        return {}
    values = opt.as_list(value)
    if values is None:
        return {name: check(value)}
    if not values:
        raise UserError(f"{name} is an empty list; give one value for each image, or one for all.")
    return {name: tuple(check(item) for item in values)}


def _share(value: object) -> float:
    return opt.share(value, "visible")


def _row_number(value: object) -> int:
    return opt.whole_number(value, "visible_rows", 0)
