"""Check that a checkpoint is correct: `imagegen verify ckpt=…`.

One line per check: what should hold, what was measured, what is still sound, and the verdict. The
exit status is 1 where any check fails.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8

from imagegen.core import values as opt
from imagegen.core.errors import UserError
from imagegen.core.files import ensure_writable, write_atomic

if TYPE_CHECKING:
    from imagegen.model.transformer import ImageTransformer

VERDICTS = {True: "ok", False: "FAIL", None: "-"}


def run(config: Mapping[str, Any]) -> dict[str, Any]:
    """Do what `conf/verify.yaml` and the command line ask; print one line per check.

    Returns:
        what is written to `out`, if that is given; `ok` is false where any check failed.

    Raises:
        UserError: for anything that cannot be; then nothing is written.
    """
    from imagegen.checkpoint.provenance import load_source, versions
    from imagegen.evaluation.checks import all_checks

    config = opt.plain(config)
    ckpt = opt.checkpoint_path(config["ckpt"])
    count = opt.whole_number(config["images"], "images", 1)
    seed = opt.whole_number(config["seed"], "seed", 0, opt.MAX_SEED)
    out = None if config["out"] is None else opt.one_path(config["out"], "out")
    if out is not None:
        ensure_writable(out)
    source = load_source(ckpt, opt.resolve_device(config["device"]))
    model = source.loaded.model
    images, origin = _images(model, source.loaded.metadata, config["dataset"], count)
    print(f"{source.loaded.path}, {len(images)} images: {origin}")
    checks = []
    for check in all_checks(model, images, seed):
        checks.append(check)
        print(
            f"{check.name:<33}{check.figure:<58}{check.tolerance:<12}{VERDICTS[check.ok]}",
            flush=True,
        )
    failed = [check.name for check in checks if check.ok is False]
    print(f"{len(failed)} of {len(checks)} checks failed" if failed else "all checks passed")
    result = {
        "ok": not failed,
        "checks": [check.to_dict() for check in checks],
        "images": len(images),
        "images_from": origin,
        "seed": seed,
        **source.to_dict(),
        **versions(),
    }
    if out is not None:
        write_atomic(out, json.dumps(result, indent=2) + "\n")
    return result


def _images(
    model: ImageTransformer,
    metadata: Mapping[str, Any],
    overrides: Mapping[str, Any] | None,
    count: int,
) -> tuple[UInt8[np.ndarray, "n h w c"], str]:
    """The first test images or, where the data are not here, random ones; and which they are."""
    from imagegen.checkpoint.training_data import dataset_of

    overrides = dict(overrides or {})
    known = metadata["dataset"]
    if isinstance(known, Mapping) and "download" in known and overrides.get("download") is None:
        overrides["download"] = False
    given = any(value is not None for name, value in overrides.items() if name != "download")
    try:
        dataset = dataset_of(metadata, overrides, model.spec)
        images = np.array(dataset.split("test").images[:count])
        if len(images):
            return images, f"{dataset.name}, test"
        reason = f"{dataset.name} has no test images"
    except UserError as error:
        if given:
            raise
        reason = str(error)
    random = np.random.default_rng(0).integers(0, model.spec.levels, (count, *model.spec.shape))
    return random.astype(np.uint8), f"random, because {reason.rstrip('.')}"
