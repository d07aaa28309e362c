"""What `imagegen evaluate` is asked to do, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagegen.core import values as opt
from imagegen.core.errors import UserError
from imagegen.core.files import ensure_writable
from imagegen.data.base import SPLIT_NAMES
from imagegen.data.regions import Region, read_region
from imagegen.generation.sample_options import PRECISIONS


@dataclass(frozen=True)
class ScoreOptions:
    """What to score and how, as `conf/evaluate.yaml` says.

    Attributes:
        dataset: options of the checkpoint's data set to replace.
        visible: the pixels that are kept, if those hidden are to be scored given them.
        particles: of an image that needs them; None if nobody has said.
        out: JSON file to write, if any.
        maps: folder to write, if any.
    """

    ckpt: str
    split: str
    batch_size: int | None
    limit: int | None
    labels: bool
    classify: bool
    precision: str | None
    visible: Region | None
    particles: int | None
    dataset: Mapping[str, Any]
    device: str
    out: Path | None
    maps: Path | None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ScoreOptions:
        """Check the plain values of `conf/evaluate.yaml`.

        Raises:
            UserError: naming the first option that cannot be.
        """
        options = cls(
            ckpt=opt.checkpoint_path(config["ckpt"]),
            split=opt.choice(config["split"], "split", SPLIT_NAMES),
            batch_size=opt.optional_whole_number(config["batch_size"], "batch_size", 1),
            limit=opt.optional_whole_number(config["limit"], "limit", 1),
            labels=opt.flag(config["labels"], "labels"),
            classify=opt.flag(config["classify"], "classify"),
            precision=None
            if config["precision"] is None
            else opt.choice(str(config["precision"]), "precision", PRECISIONS),
            visible=None if config["visible"] is None else read_region(config["visible"]),
            particles=opt.optional_whole_number(config["particles"], "particles", 1),
            dataset=config["dataset"] or {},
            device=str(config["device"]),
            out=None if config["out"] is None else opt.one_path(config["out"], "out"),
            maps=None if config["maps"] is None else opt.one_path(config["maps"], "maps"),
        )
        names = ("maps", "visible", "precision", "classify")
        ways = [name for name in names if getattr(options, name)]
        if len(ways) > 1 and ways != ["maps", "classify"]:
            raise UserError(f"{ways[0]} and {ways[1]} do not go together; leave one out.")
        if options.visible is None and options.particles is not None:
            raise UserError(f"particles={options.particles} needs visible=; add it.")
        if options.classify and not options.labels:
            raise UserError("labels=false and classify=true do not go together; leave one out.")
        if options.out is not None:
            ensure_writable(options.out)
            maps = options.maps
            if maps and (options.out.is_relative_to(maps) or maps.is_relative_to(options.out)):
                raise UserError(f"out={options.out} is in maps={maps}; name a file elsewhere.")
        return options
