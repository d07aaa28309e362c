"""Generation on a GPU: a step is recorded once, as a CUDA graph, and then only replayed.

At a small batch, a GPU waits for the program that tells it what to do next; a graph tells it the
whole step at once. The graph reads and writes the same memory each time, so the state, the position
and the random numbers are in tensors that keep their memory.

What cannot be recorded is found before a recording begins (`why_not`), because PyTorch cannot use
the GPU safely after a recording that failed: its allocator may believe that the recording still
runs (PyTorch pull request 180395), and so may its random numbers ("Offset increment outside graph
capture encountered unexpectedly").

Axes: `b` batch, `n` position, `s` value per step, `u` uniform number, `p` parameter.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64, UInt8
from torch import Tensor

from imagegen.core.errors import UserError, first_line
from imagegen.generation.decode import Decoder, Reached, next_piece
from imagegen.generation.decode.waiting import no_waiting
from imagegen.heads.controls import Controls
from imagegen.model.state import named_tensors, with_tensors
from imagegen.model.transformer import ImageTransformer, ModelState

_WARM_UP = 3
"""Steps before the recording, in which libraries choose their algorithms and allocate."""

_AHEAD = 64
"""Steps that the program may be ahead of the device, so that it can be stopped."""

_SWITCH = "IMAGEGEN_CUDA_GRAPHS"
"""Environment variable: with 0, steps are never recorded."""


@dataclass
class _Recorded:
    """Tensors that a recorded step reads and writes, and the step itself.

    Attributes:
        state: all that the model carries, the position a tensor.
        kept: the state's tensors by name.
        position: of the next step, shared by the states of all layers.
        index: how many values have been drawn.
        parameters: of the distribution of the next value to draw.
        noise: uniform numbers of the values to draw, in their order.
        drawn: the values, in their order.
        replay: does one step.
    """

    state: ModelState
    kept: dict[str, Tensor]
    position: Int64[Tensor, ""]
    index: Int64[Tensor, "1"]
    parameters: Float[Tensor, "b p"]
    noise: Float64[Tensor, "b n u"]
    drawn: UInt8[Tensor, "b n s"]
    replay: Callable[[], None]


class GraphDecoder(Decoder):
    """Draws from any model whose state keeps its size; see `why_not`.

    Args:
        model: is used as it is, on its own device.
        record: whether to record a graph; by default where the model is on a CUDA device. The same
            steps without one are for tests.

    Raises:
        ValueError: for a model that `why_not` gives a reason for.
    """

    variant = "graph"
    precision = "32"

    def __init__(self, model: ImageTransformer, record: bool | None = None) -> None:
        reason = why_not(model)
        if reason is not None:
            raise ValueError(reason)
        self.model = model
        self.record = model.device.type == "cuda" if record is None else record
        self._recorded: dict[tuple[int, Controls], _Recorded] = {}

    def draw(
        self,
        state: ModelState,
        parameters: Float[Tensor, "rows p"],
        sequence: UInt8[np.ndarray, "b n s"],
        noise: Float[np.ndarray, "kept m u"],
        controls: Controls,
        reached: Reached | None = None,
    ) -> None:
        """See `Decoder`.

        Raises:
            UserError: where the recording fails in spite of `why_not`.
        """
        device = self.model.device
        # Streams and graphs belong to the current device, which need not be the model's.
        with torch.cuda.device(device) if self.record else nullcontext():
            first, count = state.position - 1, len(sequence)
            steps = sequence.shape[1] - first
            step = self._step_for(state, parameters, controls)
            _fill(step, state, parameters, noise)
            done, piece = 0, 1 if reached else _AHEAD
            while done < steps - 1:
                piece, started = min(piece, steps - 1 - done), time.perf_counter()
                for _ in range(piece):
                    step.replay()
                done += piece
                if self.record and done < steps - 1:
                    torch.cuda.synchronize(device)
                if reached is not None:
                    sequence[:, first : first + done] = step.drawn[:count, :done].cpu().numpy()
                    reached(slice(0, count), first + done)
                    piece = next_piece(piece, time.perf_counter() - started, _AHEAD)
            last = self.model.head.sample(step.parameters, step.noise[:, steps - 1], controls)
            step.drawn[:, steps - 1] = last
            sequence[:, first:] = step.drawn[:count, :steps].cpu().numpy()
            if reached is not None:
                reached(slice(0, count), first + steps)

    def parameters(
        self,
        sequence: UInt8[np.ndarray, "b n s"],
        labels: Int64[np.ndarray, " b"] | None = None,
    ) -> Float[np.ndarray, "b n p"]:
        """See `Decoder`; by PyTorch's own steps, which the graph repeats."""
        model = self.model
        known = None if labels is None else torch.from_numpy(labels).to(model.device)
        state = model.initial_state(len(sequence), known)
        values: Tensor | None = None
        result = []
        for position in range(sequence.shape[1]):
            found, state = model.step(values, state)
            result.append(found.float().cpu().numpy())
            values = torch.from_numpy(sequence[:, position]).to(model.device)
        return np.stack(result, axis=1)

    def _step_for(
        self, state: ModelState, parameters: Float[Tensor, "b p"], controls: Controls
    ) -> _Recorded:
        key = (len(parameters), controls)
        if key not in self._recorded:
            step = _static(self.model, state, parameters, controls)
            if self.record:
                step.replay = _graph(step, state, parameters, self.model.device)
            self._recorded[key] = step
        return self._recorded[key]


def _fill(
    step: _Recorded,
    state: ModelState,
    parameters: Tensor,
    noise: Float[np.ndarray, "kept m u"],
) -> None:
    """Put a beginning into the tensors of a recorded step."""
    given = dict(named_tensors(state))
    for name, tensor in step.kept.items():
        tensor.copy_(given[name])
    step.position.fill_(state.position)
    step.index.zero_()
    step.parameters.copy_(parameters)
    step.noise[:, : noise.shape[1]].copy_(torch.from_numpy(noise))


def _static(
    model: ImageTransformer,
    state: ModelState,
    parameters: Float[Tensor, "b p"],
    controls: Controls,
) -> _Recorded:
    """Tensors of their own for a batch, and the step that goes from them to them."""
    device, batch = model.device, len(parameters)
    length, values = model.raster.length, model.raster.values_per_step
    kept = {name: tensor.clone() for name, tensor in named_tensors(state)}
    position = torch.zeros((), dtype=torch.int64, device=device)
    static = with_tensors(state, kept, "", position, batch)
    step = _Recorded(
        state=static,
        kept=kept,
        position=position,
        index=torch.zeros(1, dtype=torch.int64, device=device),
        parameters=parameters.clone(),
        noise=torch.full(
            (batch, length, model.head.uniforms_per_step),
            0.5,
            dtype=torch.float64,
            device=device,
        ),
        drawn=torch.zeros(batch, length, values, dtype=torch.uint8, device=device),
        replay=lambda: None,
    )

    def go() -> None:
        numbers = step.noise.index_select(1, step.index).squeeze(1)
        levels = model.head.sample(step.parameters, numbers, controls).to(torch.uint8)
        step.drawn.index_copy_(1, step.index, levels.unsqueeze(1))
        found, after = model.step(levels, step.state)
        for name, tensor in named_tensors(after):
            if name in kept and tensor is not kept[name]:
                kept[name].copy_(tensor)
        step.parameters.copy_(found)
        step.position.add_(1)
        step.index.add_(1)

    step.replay = go
    return step


def _graph(
    step: _Recorded, state: ModelState, parameters: Tensor, device: torch.device
) -> Callable[[], None]:
    """Record the step on the current device, `device`.

    What the tensors hold afterwards is of no use. The current stream is the one from before,
    whatever happens.

    Raises:
        UserError: where the recording fails.
    """
    noise = np.full((len(parameters), 1, step.noise.shape[2]), 0.5)
    before = torch.cuda.current_stream(device)
    # A stream of this device: the one that `torch.cuda.graph` would take may be of another.
    stream = torch.cuda.Stream(device)
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            _fill(step, state, parameters, noise)
            step.replay()
        _fill(step, state, parameters, noise)
    before.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        # Other threads, such as one that copies batches for a training, may use CUDA meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step.replay()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise UserError(
            f"recording a step of this model as a CUDA graph failed: {first_line(error)}; "
            f"PyTorch cannot use the GPU safely after that, so set {_SWITCH}=0 and run this again."
        ) from error
    finally:
        # PyTorch leaves the stream of a failed recording current.
        torch.cuda.set_stream(before)
    replay: Callable[[], None] = graph.replay
    return replay


@torch.inference_mode(False)  # in which `no_waiting` would miss some operations
@torch.no_grad()
def why_not(model: ImageTransformer) -> str | None:
    """Why a step of this model cannot be recorded; None where it can.

    One step is done as it would be recorded, on the model's device, where an operation that waits
    for the device raises.
    """
    if os.environ.get(_SWITCH) == "0":
        return f"{_SWITCH}=0"
    was_training = model.training
    model.eval()
    try:
        if not model.constant_state:
            return "a state that grows with every step cannot be recorded"
        parameters, after = model.step(None, model.initial_state(1))
        return _cannot(lambda: _static(model, after, parameters, Controls()), model.device)
    finally:
        model.train(was_training)


def _cannot(make: Callable[[], _Recorded], device: torch.device) -> str | None:
    """What a step raises that must not wait for the device; None where it does not."""
    try:
        step = make()
        # The first time, libraries may wait for what they load.
        for check in (nullcontext(), no_waiting(device)):
            step.position.zero_()
            step.index.zero_()
            with check:
                step.replay()
    # A mechanism may raise anything where its position is a tensor.
    except Exception as error:
        return f"a step cannot be recorded: {first_line(error)}"
    return None
