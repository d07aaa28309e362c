"""One step of generation as an ONNX file, for programs without PyTorch.

    inputs     token      int64 "batch s"   levels of the step before; ignored at position 0
               position   int64, no axes    number of steps done, 0 for the first one
               <state>                      each tensor of the state, the batch as its first axis
    outputs    parameters float32 "batch p" of the distribution of the next step's values
               next.<state>                 the state to go on from, one output an input

A state tensor begins as a constant that the metadata's `initial_state` names. The metadata further
say what an image is and which distribution the parameters are of; see `step_metadata`. The file
needs nothing of this package: `examples/generate_onnx.py` generates with it.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from imagegen.errors import UserError
from imagegen.model import ImageTransformer, ModelState
from imagegen.output import write_atomic

OPSET = 18
TOLERANCE = 1e-3
"""The most that a parameter may differ from the checkpoint's; float32 in another order of sums."""

CHECKED_STEPS = 64
MAX_BYTES = (1 << 31) - (1 << 24)
_NEXT = "next."


class SingleStep(nn.Module):
    """A model's step as a function of tensors only, on a copy of the model, in float32.

    Raises:
        UserError: for attention whose state grows, as no graph of fixed tensors can.
    """

    def __init__(self, model: ImageTransformer) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).cpu().float().eval().requires_grad_(False)
        _replace_bags(self.model)
        self.initial = self.model.initial_state(1)
        self._refuse_growing_states()
        self.state = dict(_named_tensors(self.initial))

    def forward(self, token: Tensor, position: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Shapes and dtypes as the module says, the state in the order of `self.state`."""
        given = dict(zip(self.state, state, strict=True))
        before = _with_tensors(self.initial, given, position, token.shape[0])
        parameters, after = self.model.step(token.to(torch.uint8), before)
        return parameters, *dict(_named_tensors(after, self.state)).values()

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        """Of the first step."""
        token = torch.zeros(batch, self.model.raster.values_per_step, dtype=torch.int64)
        state = (tensor.repeat_interleave(batch, dim=0) for tensor in self.state.values())
        return token, torch.tensor(0), *state

    def _refuse_growing_states(self) -> None:
        _, after = self.model.step(None, self.initial.clone())
        for block, old, new in zip(
            self.model.blocks, self.initial.layers, after.layers, strict=True
        ):
            if [t.shape for t in old.tensors()] != [t.shape for t in new.tensors()]:
                attention = getattr(block, "attention", block)
                name = type(getattr(attention, "mechanism", attention)).__name__
                raise UserError(
                    f"{name} keeps all earlier positions, so its state grows with every step and "
                    "has no place in an ONNX file; export a model whose state keeps its size, such "
                    "as one with attention=linear."
                )


class _SummedEmbedding(nn.Module):
    """What `EmbeddingBag` gives, in operations that the exporter translates rightly."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, index: Tensor) -> Tensor:
        return F.embedding(index, cast(Tensor, self.weight)).sum(dim=1)


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
    of a step; `order` of the values, in words; `head`, the distribution, and its `n_mixtures`;
    `initial_state`, JSON: the number that fills each state tensor at first.
    """
    model = step.model
    head = type(model.head)
    facts: dict[str, Any] = {
        "producer": "imagegen",
        **model.spec.to_dict(),
        "steps": model.raster.length,
        "values_per_step": model.raster.values_per_step,
        "order": "rows from the top, pixels from the left, the channels of a pixel together",
        "head": head.__module__.rpartition(".")[2],
        "initial_state": json.dumps({name: _fill(t) for name, t in step.state.items()}),
    }
    n_mixtures = getattr(model.head, "n_mixtures", None)
    if n_mixtures is not None:
        facts["n_mixtures"] = n_mixtures
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
        expected = model.parameters_of(sequence).numpy()
    types = {"tensor(float)": np.float32, "tensor(uint8)": np.uint8, "tensor(int64)": np.int64}
    state = {
        entry.name: np.full((2, *entry.shape[1:]), fill[entry.name], types[entry.type])
        for entry in session.get_inputs()
        if entry.name in fill
    }
    names = [entry.name for entry in session.get_outputs()]
    token, worst = np.zeros((2, sequence.shape[2]), np.int64), 0.0
    for position in range(steps):
        feed = {"token": token, "position": np.array(position), **state}
        found = dict(zip(names, session.run(names, feed), strict=True))
        worst = max(worst, float(np.abs(found["parameters"] - expected[:, position]).max()))
        state = {name: found[_NEXT + name] for name in state}
        token = sequence[:, position].numpy().astype(np.int64)
    return worst


def _exported(step: SingleStep) -> bytes:
    names = list(step.state)
    batch = torch.export.Dim("batch")
    inputs = step.inputs(2)
    dynamic = ({0: batch}, None, tuple({0: batch} for _ in names))
    with warnings.catch_warnings(), torch.enable_grad():
        # Of the exporter about its own parts. With gradients on, a step leaves its inputs alone.
        warnings.simplefilter("ignore")
        program = torch.export.export(step, inputs, dynamic_shapes=dynamic, strict=False)
        exported = torch.onnx.export(
            program,
            input_names=["token", "position", *names],
            output_names=["parameters", *(_NEXT + name for name in names)],
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


def _replace_bags(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.EmbeddingBag) and child.mode == "sum":
                setattr(module, name, _SummedEmbedding(child.weight.detach()))


def _named_tensors(
    state: ModelState, only: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state that hold something, by the names of their inputs."""
    yield "recent", state.recent
    for index, layer in enumerate(state.layers):
        for field in dataclasses.fields(layer):
            name, value = f"layers.{index}.{field.name}", getattr(layer, field.name)
            if only is None:
                wanted = isinstance(value, Tensor) and value.numel() > 0
            else:
                wanted = name in only
            if wanted:
                yield name, value


def _with_tensors(
    initial: ModelState, given: Mapping[str, Tensor], position: Tensor, batch: int
) -> ModelState:
    """A state like `initial` of the given tensors; whole numbers in it count positions."""
    layers = []
    for index, layer in enumerate(initial.layers):
        changed: dict[str, Any] = {}
        for field in dataclasses.fields(layer):
            value = getattr(layer, field.name)
            if isinstance(value, Tensor):
                empty = value.new_zeros(batch, *value.shape[1:])
                changed[field.name] = given.get(f"layers.{index}.{field.name}", empty)
            elif isinstance(value, int):
                changed[field.name] = position
        layers.append(dataclasses.replace(layer, **changed))
    return dataclasses.replace(initial, position=position, recent=given["recent"], layers=layers)


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
        raise UserError(f"{missing[0]} is not installed; type `pip install -e '.[onnx]'`.")
