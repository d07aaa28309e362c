"""From the groups of a training configuration to the arguments of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from imagegen.core.build import check_options
from imagegen.core.errors import UserError
from imagegen.data.base import ImageDataset
from imagegen.model.transformer import OPTION_GROUPS, ImageTransformer, known_options


def model_options(config: Mapping[str, Any], dataset: ImageDataset) -> dict[str, Any]:
    """What `ImageTransformer.from_options` takes but for the images' spec, as plain containers.

    Args:
        config: a composed `conf/train.yaml`, as plain containers; the groups `model`, `attention`
            and `head` matter.
        dataset: gives the number of classes to `model.conditional=true`, and is prepared for that.

    Raises:
        UserError: for a conditional model of data without labels, and values of a wrong kind.
    """
    model = {**config["model"], "attention": config["attention"], "head": config["head"]}
    conditional = model.pop("conditional", False)
    if not isinstance(conditional, bool):
        raise UserError(f"model.conditional={conditional}, but it must be true or false.")
    if conditional:
        # The names of an image folder's classes are known once it is prepared.
        dataset.prepare()
        if dataset.class_names is None:
            raise UserError(
                f"model.conditional=true needs labels, but data set {dataset.name} has none; give "
                "an image folder with a sub-folder for each class, or leave it false."
            )
        model["n_classes"] = len(dataset.class_names)
    offered = known_options()
    needed = {name for name, option in offered.items() if option.default is option.empty}
    if unknown := sorted(model.keys() - offered.keys()):
        raise UserError(f"there is no option model.{unknown[0]}; leave it out.")
    if missing := sorted(needed - model.keys()):
        raise UserError(
            f"model.{missing[0]} is not set; set it, or begin a model of your own with "
            "'defaults: [default, _self_]'."
        )
    for annotated in (ImageTransformer.__init__, *OPTION_GROUPS.values()):
        check_options("model", annotated, model)
    return model
