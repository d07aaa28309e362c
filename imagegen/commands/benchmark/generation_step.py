"""Steps of generation at several positions of an image; what `generate` measures in a process.

Axes: `b` batch, `n` position, `s` value per step, `u` uniform number, `p` parameter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from imagegen.attention.base import AttentionState
from imagegen.attention.buffers import FIRST_CAPACITY
from imagegen.attention.linear import LinearState
from imagegen.attention.softmax import SoftmaxState
from imagegen.commands.benchmark.contestants import Drawer
from imagegen.commands.benchmark.peer_library import PeerGenerator
from imagegen.commands.benchmark.setting import Setting
from imagegen.core.errors import UserError
from imagegen.generation.decode import SHORTEST, Decoder, choose_decoder
from imagegen.heads.controls import Controls
from imagegen.model.transformer import ImageTransformer, ModelState

Step = Callable[[], None]

_SHORT, _MOST = 0.1, 9
"""Calls of the compiled loop are repeated up to so many seconds and so many times."""


@dataclass(frozen=True)
class GenerationStep:
    """Times steps at each position; a job for a `Worker`, which returns seconds per step at each.

    States and caches are of random content, as they are behind that many steps.

    Attributes:
        drawer: what draws.
        batch_size: images drawn together.
        positions: first step that is timed, of each piece.
        steps: timed in a piece, at most.
        piece: seconds after which a piece ends.
    """

    drawer: Drawer
    setting: Setting
    batch_size: int
    positions: tuple[int, ...]
    steps: int
    piece: float
    threads: int
    device: str

    def prepare(self) -> Callable[[], Sequence[float]]:
        """Build the model; returns what times a piece at each position."""
        torch.manual_seed(self.setting.seed % 2**63)
        seconds = self._timer()

        def go() -> list[float]:
            with torch.inference_mode():
                return [seconds(position) for position in self.positions]

        return go

    def _timer(self) -> Callable[[int], float]:
        drawer, device = self.drawer, torch.device(self.device)
        if drawer.form == "peer":
            peer = PeerGenerator(self.setting, drawer.attention).to(device).eval()
            return lambda position: self._timed(_peer_step(peer, self.batch_size, position))
        model = self.setting.build(drawer.attention).to(device)
        if drawer.form == "compiled":
            return self._compiled_timer(model)
        begin = {"step": _step, "recomputed": _recomputed}[drawer.form]
        return lambda position: self._timed(begin(model, self.batch_size, position, self.steps))

    def _timed(self, step: Step) -> float:
        """Seconds a step."""
        finish = _finisher(self.device)
        finish()
        started, done = time.perf_counter(), 0
        while done < self.steps and (done == 0 or time.perf_counter() - started < self.piece):
            step()
            done += 1
        finish()
        return (time.perf_counter() - started) / done

    def _compiled_timer(self, model: ImageTransformer) -> Callable[[int], float]:
        """The loop is called once for an image, and copies the state then.

        What a call takes beside its steps is left out, by the difference of two calls, and the
        copies, where the decoder tells them apart: those of large caches take longer than steps.
        """
        decoder = choose_decoder(model, Controls(), self.drawer.precision)
        if decoder is None:
            short = model.raster.length < SHORTEST
            why = (
                f"images of fewer than {SHORTEST} steps" if short else "this model on this machine"
            )
            raise UserError(f"there is no compiled loop for {why}")

        def call(position: int, steps: int) -> float:
            return self._call(decoder, model, self.batch_size, position, steps)

        def seconds(position: int) -> float:
            expected = max(call(position, 1) - call(position, 0), 1e-6)
            steps = max(1, min(self.steps, int(self.piece / expected)))
            found: list[float] = []
            spent = 0.0
            # Of few and fast steps one difference says little.
            while not found or (spent < _SHORT and len(found) < _MOST):
                whole, rest = call(position, steps), call(position, 0)
                spent += whole
                found.append((whole - rest) / steps)
            # A machine that is busy now and then may make the differences meaningless.
            middle = statistics.median(found)
            return middle if middle > 0 else whole / steps

        with torch.inference_mode():
            # What is loaded once is not to be taken for memory of the steps.
            self._call(decoder, model, 1, 0, 1)
        return seconds

    def _call(
        self,
        decoder: Decoder,
        model: ImageTransformer,
        batch_size: int,
        position: int,
        steps: int,
    ) -> float:
        """Seconds of one call that draws the step at `position` and makes so many behind it."""
        rng = np.random.default_rng(self.setting.seed)
        state, parameters = _filled(model, batch_size, position, 0)
        shape = (batch_size, position + 1 + steps, model.raster.values_per_step)
        sequence = rng.integers(0, model.spec.levels, shape).astype(np.uint8)
        noise = rng.random((batch_size, steps + 1, model.head.uniforms_per_step))
        finish = _finisher(self.device)
        finish()
        started = time.perf_counter()
        decoder.draw(state, parameters, sequence, noise.clip(1e-9, 1 - 1e-9), Controls())
        finish()
        elapsed = time.perf_counter() - started
        return elapsed if decoder.loop_seconds is None else decoder.loop_seconds


@dataclass(frozen=True)
class Ceilings:
    """What the machine can do; a job for a `Worker`.

    It returns the seconds of one product of two float32 matrices of `size` squared and of one copy
    of `copied` bytes.
    """

    size: int
    copied: int
    threads: int
    device: str

    def prepare(self) -> Callable[[], Sequence[float]]:
        """Make the matrices and the memory."""
        device = torch.device(self.device)
        finish = _finisher(self.device)
        a, b, c = (torch.rand(self.size, self.size, device=device) for _ in range(3))
        source = torch.ones(self.copied // 4, device=device)
        target = torch.zeros_like(source)

        def timed(work: Callable[[], object]) -> float:
            finish()
            started = time.perf_counter()
            work()
            finish()
            return time.perf_counter() - started

        return lambda: [
            timed(lambda: torch.mm(a, b, out=c)),
            timed(lambda: target.copy_(source)),
        ]


def _finisher(device: str) -> Callable[[], None]:
    if device.startswith("cuda"):
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def _step(model: ImageTransformer, batch_size: int, position: int, steps: int) -> Step:
    state, parameters = _filled(model, batch_size, position, steps)
    noise = _noise(model, batch_size, steps)
    controls, done = Controls(), 0

    def step() -> None:
        nonlocal state, parameters, done
        values = model.head.sample(parameters, noise[:, done], controls)
        parameters, state = model.step(values.byte(), state)
        done += 1

    return step


def _recomputed(model: ImageTransformer, batch_size: int, position: int, steps: int) -> Step:
    """Without a state: all positions so far go through the parallel form at each step."""
    raster = model.raster
    shape = (batch_size, position + steps + 1, raster.values_per_step)
    sequence = torch.randint(0, model.spec.levels, shape, dtype=torch.uint8, device=model.device)
    noise = _noise(model, batch_size, steps)
    controls, done = Controls(), 0

    def step() -> None:
        nonlocal done
        at = position + done
        parameters = model.parameters_of(sequence[:, : at + 1])[:, -1]
        sequence[:, at] = model.head.sample(parameters, noise[:, done], controls).byte()
        done += 1

    return step


def _peer_step(peer: PeerGenerator, batch_size: int, position: int) -> Step:
    state = peer.filled_state(batch_size, position)
    values: Int64[Tensor, "b s"] = torch.zeros(
        batch_size, peer.raster.values_per_step, dtype=torch.long, device=peer.place.device
    )

    def step() -> None:
        nonlocal state, values, position
        values, state = peer.step(values, position, state)
        position += 1

    return step


def _noise(model: ImageTransformer, batch_size: int, steps: int) -> Float[Tensor, "b n u"]:
    shape = (batch_size, steps, model.head.uniforms_per_step)
    return torch.rand(shape, dtype=torch.float64, device=model.device).clamp(1e-9, 1 - 1e-9)


def _filled(
    model: ImageTransformer, batch_size: int, position: int, steps: int
) -> tuple[ModelState, Float[Tensor, "b p"]]:
    """A state of random content behind the step at `position`, and that step's distribution.

    A cache has room for `steps` more positions, so that none of its rare copies is timed.
    """
    state = model.initial_state(batch_size)
    recent = torch.randint_like(state.recent, model.spec.levels)
    layers = [_random(layer, position + 1, steps) for layer in state.layers]
    hidden = torch.randn(batch_size, model.embedding.d_model, device=model.device)
    state = replace(state, position=position + 1, recent=recent, layers=layers)
    return state, model.head(hidden)


def _random(state: AttentionState, known: int, steps: int) -> AttentionState:
    if isinstance(state, LinearState):
        return LinearState(torch.randn_like(state.s), torch.rand_like(state.z) + known)
    assert isinstance(state, SoftmaxState)
    batch, heads, _, features = state.keys.shape
    capacity = FIRST_CAPACITY
    while capacity < known + steps:
        capacity *= 2
    keys, values = (
        torch.randn(batch, heads, capacity, features, device=state.keys.device) for _ in range(2)
    )
    return SoftmaxState(keys, values, known)
