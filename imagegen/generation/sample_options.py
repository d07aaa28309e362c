"""The options of `sample.py`, checked as far as can be without the checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imagegen.core import values as opt
from imagegen.core.errors import UserError
from imagegen.data.regions import Region, read_region, read_rows
from imagegen.heads.controls import Controls

TASKS = ("sample", "complete")
PRECISIONS = ("auto", "32", "bf16", "int16", "int8")
"""Of the weights in compiled loops; see `imagegen.generation.decode.choose_decoder`."""


@dataclass(frozen=True)
class SampleOptions:
    """What to draw and where, checked as far as can be without the checkpoint.

    Attributes:
        out: absolute path of the folder to write.
        n: number of images; for a completion, of images to complete (None: all in `images`).
        images: files and folders to complete; None takes them from the data set's test split.
        visible: what is kept, one region for all images or a tuple of one for each; None for what
            is not transparent, or else half of the rows.
        mask: the file or folder that says what is kept, instead of `visible`.
        particles: of each image that needs them; None if nobody has said.
        completions: of each image.
        controls: how to draw.
        precision: of the weights where a compiled loop draws.
        label: what was typed as label=; None for images without labels.
        dataset: options of the checkpoint's data set to replace.
        resume: whether to continue a job that `out` holds.
        part: (i, k) for part i, from 1 on, of k that share the work; None for all of it.
    """

    task: str
    ckpt: str
    out: Path
    n: int | None = None
    seed: int = 0
    controls: Controls = field(default_factory=Controls)
    label: Any = None
    batch_size: int | None = None
    device: str = "auto"
    precision: str = "auto"
    images: tuple[Path, ...] | None = None
    visible: Region | tuple[Region, ...] | None = None
    mask: Path | None = None
    particles: int | None = None
    completions: int = 4
    resize: bool = False
    dataset: Mapping[str, Any] = field(default_factory=dict)
    resume: bool = False
    part: tuple[int, int] | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SampleOptions:
        """Check the plain values of `conf/sample.yaml`.

        Raises:
            UserError: naming the first option that cannot be.
        """
        task = opt.choice(config["task"], "task", TASKS)
        if task == "sample":
            for name in "images visible visible_rows mask particles completions".split():
                if config[name] is not None:
                    raise UserError(f"{name} is not used by task=sample; add task=complete.")
        controls = controls_of(config)
        completions = config["completions"]
        if completions is None:
            # Greedy completions of one image are all the same.
            completions = 1 if controls.greedy else 4
        resume, part = opt.flag(config["resume"], "resume"), _part(config["part"])
        if config["out"] is None and (resume or part is not None):
            raise UserError(
                f"{'resume' if part is None else 'part'} needs out=<the folder of the whole job>."
            )
        return cls(
            task=task,
            ckpt=opt.checkpoint_path(config["ckpt"]),
            out=opt.out_folder(config["out"], "samples"),
            n=opt.optional_whole_number(config["n"], "n", 1),
            seed=opt.whole_number(config["seed"], "seed", 0, opt.MAX_SEED),
            controls=controls,
            label=config["label"],
            batch_size=opt.optional_whole_number(config["batch_size"], "batch_size", 1),
            device=str(config["device"]),
            precision=opt.choice(str(config["precision"]), "precision", PRECISIONS),
            images=None if config["images"] is None else opt.paths(config["images"], "images"),
            completions=opt.whole_number(completions, "completions", 1),
            resize=opt.flag(config["resize"], "resize"),
            dataset=config["dataset"] or {},
            resume=resume,
            part=part,
            visible=_visible(config),
            mask=None if config["mask"] is None else opt.one_path(config["mask"], "mask"),
            particles=opt.optional_whole_number(config["particles"], "particles", 1),
        )


def _part(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", str(value))
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(
            f"part={value}, but it must be <which>/<how many>: 1/2 and 2/2 for two processes."
        )
    return int(match[1]), int(match[2])


def _visible(config: Mapping[str, Any]) -> Region | tuple[Region, ...] | None:
    """What `visible` or `visible_rows` says; a list stays one, as a tuple."""
    given = [name for name in ("visible", "visible_rows", "mask") if config[name] is not None]
    if len(given) > 1:
        raise UserError(f"{given[0]} and {given[1]} are both given; choose one.")
    if not given or given == ["mask"]:
        return None
    (name,) = given
    read: Callable[[object], Region] = read_region if name == "visible" else read_rows
    values = opt.as_list(config[name])
    if values is None:
        return read(config[name])
    if not values:
        raise UserError(f"{name} is an empty list; give one value for each image, or one for all.")
    return tuple(read(value) for value in values)


def temperature_value(value: object, name: str = "temperature") -> float:
    """A temperature: finite, 0 (greedy) or more."""
    number = opt.real(value)
    if number is None or not math.isfinite(number) or number < 0:
        raise UserError(
            f"{name}={opt.as_typed(value)}, but it must be a number of 0 (greedy) or more; "
            "1 draws from the model as trained."
        )
    return number


def controls_of(config: Mapping[str, Any]) -> Controls:
    """The options that say how to draw.

    Raises:
        UserError: naming the first one that cannot be.
    """
    given: dict[str, float] = {}
    for name in ("temperature", "mixture_temperature", "scale_temperature"):
        if config[name] is not None:
            given[name] = temperature_value(config[name], name)
    for name, allowed in (("top_p", "above 0 and at most 1"), ("guidance", "0 or more")):
        number = opt.real(config[name])
        if number is None or not math.isfinite(number):
            raise UserError(
                f"{name}={opt.as_typed(config[name])}, but it must be a number, {allowed}."
            )
        given[name] = number
    return Controls(**given)


def labels_of(
    value: object, class_names: Sequence[str] | None, known: int | None
) -> list[int] | None:
    """The class numbers of what was typed as `label=`: a name, a number, `all`, or a list of them.

    Args:
        value: what was typed; None, and nothing else, gives None.
        class_names: of the model's data set. A name comes before a number, and a name in another
            case after both, where no other name differs from it in case alone.
        known: number of classes that the model knows; None for a model without.

    Raises:
        UserError: for a model without classes, and for names and numbers of no class.
    """
    if value is None:
        return None
    if known is None:
        raise UserError(
            f"label={opt.as_typed(value)}, but this model was trained without labels; train one "
            "with model.conditional=true."
        )
    names = list(class_names or map(str, range(known)))
    if value == "all" and "all" not in names:
        return list(range(known))
    values = opt.as_list(value)
    if values == []:
        raise UserError("label is an empty list; give at least one class.")
    return [_label(item, names) for item in ([value] if values is None else values)]


def _label(value: object, names: Sequence[str]) -> int:
    if str(value) in names:
        return names.index(str(value))
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names):
        return value
    folded = [name.casefold() for name in names]
    if folded.count(str(value).casefold()) == 1:
        return folded.index(str(value).casefold())
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    raise UserError(f"label={opt.as_typed(value)} is not one of this model's classes: {shown}.")
