"""One step of generation as an ONNX file, for programs without PyTorch.

    inputs     token      int64 "batch s"   levels of the step before; ignored at position 0
               position   int64, no axes    number of steps done, 0 for the first one
               label      int64 "batch"     of models that know labels: -1 is no label
               <state>                      each tensor of the state, the batch as its first axis
    outputs    parameters float32 "batch p" of the distribution of the next step's values
               next.<state>                 the state to continue from, one output an input

A state tensor begins as a constant that the metadata's `initial_state` names. The metadata further
say what an image is and which distribution the parameters are of; see `step_metadata`. A model of
any order (`canvas.…` among its state) draws whole images in the order of the raster from such a
beginning. To complete a region, let the first `canvas.kept` steps be those of visible pixels, whose
values are then fed as tokens instead of drawn ones; `canvas.place_shift` is, for each step, its
place in the raster minus the step, and `canvas.rank_shift`, for each place, its step minus the
place. Both kinds of pixels keep the order of the raster among themselves. The file
needs nothing of this package: `examples/generate_onnx.py` generates with it.
"""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imagegen.checkpoint.onnx_step import SingleStep
from imagegen.core.errors import UserError
from imagegen.core.files import write_atomic
from imagegen.core.installation import pip_install
from imagegen.heads.mixture_of_logistics import MixtureOfLogistics
from imagegen.model.transformer import NO_LABEL, ImageTransformer

OPSET = 18
TOLERANCE = 1e-3
"""The most that a parameter may differ from the checkpoint's; float32 in another order of sums."""

CHECKED_STEPS = 64
MAX_BYTES = (1 << 31) - (1 << 24)
_NEXT = "next."


def export_onnx(model: ImageTransformer, out: Path) -> float:
    """Write one step of the model to the file `out`, whole or not at all.

    The file is run by onnxruntime next to the model, over the first steps of random images, before
    it is put in its place.

    Returns:
        the largest difference of a parameter found there.

    Raises:
        UserError: for a model that cannot be exported, packages that are not installed, or a file
            that cannot be written.
    """
    _require("onnx", "onnxscript", "onnxruntime")
    step = SingleStep(model)
    size = sum(tensor.nbytes for tensor in step.state_dict().values())
    if size > MAX_BYTES:
        raise UserError(
            f"the weights take {size / 2**30:.1f} GiB, but an ONNX file holds 2 at most; export to "
            "format=safetensors instead."
        )
    content = _exported(step)
    error = largest_difference(model, content)
    if not error <= TOLERANCE:
        raise UserError(
            f"onnxruntime's parameters differ by {error:.2g} from the model's, more than "
            f"{TOLERANCE:g}, so nothing was written; export to format=safetensors instead."
        )
    write_atomic(out, content)
    return error


def step_metadata(step: SingleStep) -> dict[str, str]:
    """What a program has to know to generate with the file, as strings.

    `height`, `width`, `channels`, `levels` of the images; `steps` of one, and `values_per_step`
    of a step; `n_classes`, the number of labels; `order` of the values, in words; `head`, the
    distribution, with its `n_mixtures`, whether it is `categorical` too (1, or 0) and the
    `uniforms_per_step` that our sampler takes for it;
    `initial_state`, JSON: the number that fills each state tensor at first.
    """
    model = step.model
    head = type(model.head)
    facts: dict[str, Any] = {
        "producer": "imagegen",
        **model.spec.to_dict(),
        "steps": model.raster.length,
        "values_per_step": model.raster.values_per_step,
        "uniforms_per_step": model.head.uniforms_per_step,
        "n_classes": model.n_classes or 0,
        "order": ("the visible pixels, then the others: " if model.order == "any" else "")
        + "rows from the top, pixels from the left, the channels of a pixel together",
        "head": head.__module__.rpartition(".")[2],
        "initial_state": json.dumps({name: _fill(t) for name, t in step.state.items()}),
    }
    if isinstance(model.head, MixtureOfLogistics):
        facts["n_mixtures"] = model.head.n_mixtures
        facts["categorical"] = int(model.head.categorical)
    return {name: str(fact) for name, fact in facts.items()}


def largest_difference(model: ImageTransformer, content: bytes) -> float:
    """The largest difference of a parameter over the first steps of two random images."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    facts = session.get_modelmeta().custom_metadata_map
    fill = json.loads(facts["initial_state"])
    model = copy.deepcopy(model).cpu().float().eval()
    spec, steps = model.spec, min(model.raster.length, CHECKED_STEPS)
    random = np.random.default_rng(0).integers(0, spec.levels, (2, *spec.shape), dtype=np.uint8)
    with torch.inference_mode():
        sequence = model.raster.to_sequence(torch.from_numpy(random))
        known = None if model.n_classes is None else [NO_LABEL, model.n_classes - 1]
        given = None if known is None else torch.tensor(known)
        expected = model.parameters_of(sequence, given).numpy()
    types = {"tensor(float)": np.float32, "tensor(uint8)": np.uint8, "tensor(int64)": np.int64}
    state = {
        entry.name: np.full((2, *entry.shape[1:]), fill[entry.name], types[entry.type])
        for entry in session.get_inputs()
        if entry.name in fill
    }
    names = [entry.name for entry in session.get_outputs()]
    token, worst = np.zeros((2, sequence.shape[2]), np.int64), 0.0
    labels = {"label": np.array(known)} if known else {}
    for position in range(steps):
        feed = {"token": token, "position": np.array(position), **labels, **state}
        found = dict(zip(names, session.run(names, feed), strict=True))
        worst = max(worst, float(np.abs(found["parameters"] - expected[:, position]).max()))
        state = {name: found[_NEXT + name] for name in state}
        token = sequence[:, position].numpy().astype(np.int64)
    return worst


def _exported(step: SingleStep) -> bytes:
    batch = torch.export.Dim("batch")
    inputs = step.inputs(2)
    token, position, *others = inputs.values()
    axes = [{0: batch} if tensor.dim() else None for tensor in inputs.values()]
    dynamic = (axes[0], axes[1], axes[2:])
    with warnings.catch_warnings(), torch.enable_grad():
        # Of the exporter about its own parts. With gradients on, a step leaves its inputs alone.
        warnings.simplefilter("ignore")
        program = torch.export.export(
            step, (token, position, others), dynamic_shapes=dynamic, strict=False
        )
        exported = torch.onnx.export(
            program,
            input_names=list(inputs),
            output_names=["parameters", *(_NEXT + name for name in step.state)],
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    if exported is None:
        raise RuntimeError("torch.onnx.export returned nothing")
    exported.model.metadata_props.update(step_metadata(step))
    proto = exported.model_proto
    for value in (*proto.graph.input, *proto.graph.output):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param:
                axis.dim_param = "batch"
    # The exporter's notes on every operation name folders of this machine.
    del proto.graph.value_info[:]
    _forget_notes(proto.graph.node)
    content: bytes = proto.SerializeToString()
    return content


def _forget_notes(nodes: Any) -> None:
    for node in nodes:
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
        for attribute in node.attribute:
            _forget_notes(attribute.g.node)


def _fill(tensor: Tensor) -> float:
    """The number that a state tensor is filled with at first."""
    number: float = tensor.flatten()[0].item()
    if not torch.equal(tensor, torch.full_like(tensor, number)):
        raise RuntimeError("a state that does not begin as a constant cannot be exported")
    return number


def _require(*packages: str) -> None:
    import importlib.util

    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        how = pip_install("onnx", "onnx onnxruntime onnxscript")
        raise UserError(f"{missing[0]} is not installed; type `{how}`.")
