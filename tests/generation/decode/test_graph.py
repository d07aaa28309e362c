"""Steps between tensors that stay where they are draw what PyTorch's own steps draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from imagegen.attention import local
from imagegen.attention.buffers import ring_step
from imagegen.cli.entry import PROJECT_ROOT
from imagegen.core.errors import UserError
from imagegen.core.spec import ImageSpec
from imagegen.generation import decode, sampling_request
from imagegen.generation.decode.graph import GraphDecoder, why_not
from imagegen.generation.decode.waiting import Waits, no_waiting
from imagegen.generation.sampling_loop import complete, continue_sequences
from imagegen.generation.sampling_request import SamplingRequest, initial_state, no_gradients
from imagegen.heads.controls import Controls
from imagegen.model.transformer import ImageTransformer
from tests.generation.decode.cuda_recorder import (
    FakeCuda,
    needs_fake_cuda,
    shortened,
    sync_debug_modes,
    to_fake_cuda,
)
from tests.helpers import tiny_model

NEIGHBOURHOOD = {"_target_": "imagegen.model.embeddings.Neighbourhood"}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
GREY, COLOUR = ImageSpec(5, 4, 1, 17), ImageSpec(4, 3, 3)


def _attention(name: str, **options: Any) -> dict[str, Any]:
    return {"attention": {"_target_": f"imagegen.attention.{name}", **options}}


MODELS: dict[str, tuple[ImageSpec, dict[str, Any]]] = {
    "paper": (GREY, {"norm_first": False, "activation": "relu", "n_layers": 2}),
    "default": (GREY, {"embedding": NEIGHBOURHOOD, "n_layers": 2, "convolution": [1, 1]}),
    "pixels": (
        COLOUR,
        {
            "embedding": NEIGHBOURHOOD,
            "tokens": "pixel",
            "n_classes": 3,
            "label_grid": 2,
            "flips": True,
        },
    ),
    "any order": (
        COLOUR,
        {
            "embedding": NEIGHBOURHOOD,
            "order": "any",
            "tokens": "pixel",
            "linear_prediction": True,
            "n_classes": 3,
            "label_grid": 2,
        },
    ),
    "favor": (GREY, _attention("linear.LinearAttention", feature_map="favor")),
    "local": (GREY, _attention("local.LocalAttention", window=3)),
}

MECHANISMS = sorted(path.stem for path in (PROJECT_ROOT / "conf/attention").glob("*.yaml"))
CONFIGS: dict[str, dict[str, Any]] = {
    name: yaml.safe_load((PROJECT_ROOT / f"conf/attention/{name}.yaml").read_text())
    for name in MECHANISMS
}
GROWING = {
    name
    for name, config in CONFIGS.items()
    if not tiny_model(GREY, attention=config, n_layers=3).constant_state
}
# The default one keeps all positions in some layers.
CONFIGS["hybrid of linear and local"] = {**CONFIGS["hybrid"], "pattern": ["linear", "local"]}
MODELS |= {
    f"{name}.yaml": (GREY, {"attention": config, "n_layers": 1 + name.startswith("hybrid")})
    for name, config in CONFIGS.items()
    if name not in GROWING
}


def _draw(
    model: ImageTransformer, decoder: decode.Decoder | None, seed: int, visible: int
) -> np.ndarray:
    """Five images from their first `visible` steps on, given or drawn."""
    labels = None if model.n_classes is None else (0, 2, -1)
    request = SamplingRequest(seed, Controls(), labels, None, decoder)
    streams = [(image, 0) for image in range(5)]
    with no_gradients(model):
        state = initial_state(model, range(5), 5, request)
        if visible:
            values = model.raster.values_per_step
            prefix = np.random.default_rng(0).integers(0, model.spec.levels, (5, visible, values))
            known = torch.from_numpy(prefix.astype(np.uint8)).to(model.device)
            parameters, state = model.prefill(known, state)
        else:
            parameters, state = model.step(None, state)
        return continue_sequences(model, parameters, state, streams, request).cpu().numpy()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_the_same_images(name: str, device: str) -> None:
    spec, options = MODELS[name]
    model = tiny_model(spec, **options).to(device)
    assert why_not(model) is None
    decoder = GraphDecoder(model)
    # The recorded step is used again, from another beginning.
    for seed, visible in ((0, 0), (1, 0), (2, 6)):
        expected = _draw(model, None, seed, visible)
        drawn = _draw(model, decoder, seed, visible)
        if device == "cpu":
            assert np.array_equal(drawn, expected)
        else:  # a level may be rounded otherwise, and the rest of an image then differs
            assert (drawn == expected).reshape(5, -1).all(axis=1).mean() >= 0.6


def test_a_growing_state_is_left_to_pytorch() -> None:
    model = tiny_model(GREY, **_attention("softmax.SoftmaxAttention"))
    assert "grows" in str(why_not(model))
    with pytest.raises(ValueError, match="grows"):
        GraphDecoder(model)


def test_known_sequences() -> None:
    model = tiny_model(GREY)
    sequence = torch.randint(17, (3, 20, 1), dtype=torch.uint8)
    with torch.inference_mode():
        expected = model.eval().parameters_of(sequence)
        found = GraphDecoder(model).parameters(sequence.numpy())
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@needs_gpu
def test_it_is_chosen_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "SHORTEST", 1)
    decoder = decode.choose_decoder(tiny_model(GREY).cuda(), Controls())
    assert isinstance(decoder, GraphDecoder)
    _draw(decoder.model, decoder, 0, 0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda().install(monkeypatch)


@pytest.mark.parametrize("name", MODELS)
def test_a_recorded_step_draws_the_same_images(name: str, cuda: FakeCuda) -> None:
    """Replayed operations see memory alone: a number that the host knew would stay as it was."""
    spec, options = MODELS[name]
    model = tiny_model(spec, **options)
    decoder = GraphDecoder(model, record=True)
    for seed, visible in ((0, 0), (1, 0), (2, 6)):
        expected = _draw(model, None, seed, visible)
        cuda.events.clear()
        assert np.array_equal(_draw(model, decoder, seed, visible), expected)
        assert cuda.events.count("replay") == model.raster.length - visible - 1
        assert ("capture" in cuda.events) == (seed == 0)
    assert (cuda.current, cuda.stream) == (0, cuda.defaults[0])


def test_a_recorded_step_completes_different_regions(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of each region is put into the memory that the replays read."""
    spec, options = MODELS["any order"]
    model = tiny_model(spec, **options)
    images = np.random.default_rng(0).integers(0, 256, (4, *spec.shape)).astype(np.uint8)
    visible = np.ones((4, spec.height, spec.width), dtype=bool)
    visible[0, 0] = visible[1, 1:3] = visible[2, 1:, 1:] = visible[3, :3, ::2] = False
    expected = complete(model, images, visible, 3, seed=1)
    decoder = GraphDecoder(model, record=True)
    monkeypatch.setattr(sampling_request, "choose_decoder", lambda *_: decoder)
    assert np.array_equal(complete(model, images, visible, 3, seed=1), expected)
    # The step recorded for a region of three pixels is used again for the others, of six.
    assert cuda.events.count("capture") == 1
    assert cuda.events.count("replay") == 2 + 5


def test_how_a_step_is_recorded(cuda: FakeCuda) -> None:
    """Every event happens on the model's device, or `FakeCuda` raises."""
    decoder = GraphDecoder(tiny_model(ImageSpec(10, 10, 1)), record=True)
    _draw(decoder.model, decoder, 0, 0)
    assert shortened(cuda.events) == [
        "stream",
        "side waits for default",
        "on side",
        "default waits for side",
        "graph",
        "capture",
        "replay x 64",
        "synchronize",
        "replay x 35",
    ]


def test_warm_up_steps_run_on_the_side_stream(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = GraphDecoder(tiny_model(GREY), record=True)
    step, streams = decoder.model.step, []

    def watched(*arguments: Any) -> Any:
        streams.append((cuda.stream.name, cuda.capturing))
        return step(*arguments)

    monkeypatch.setattr(decoder.model, "step", watched)
    _draw(decoder.model, decoder, 0, 3)
    assert streams == [("side", False)] * 3 + [("side", True)]


def _reads_back() -> None:
    torch.ones(2).nonzero()


def _runs_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("fails", "error", "message"),
    [
        (_reads_back, UserError, "as a CUDA graph failed: CUDA error: operation failed due to a"),
        (_runs_out_of_memory, torch.OutOfMemoryError, "CUDA out of memory"),
    ],
)
def test_a_recording_that_fails(
    fails: Callable[[], None], error: type[Exception], message: str, cuda: FakeCuda
) -> None:
    """PyTorch's state is unsafe then, so nothing more is drawn; stream and device are as before."""
    decoder = GraphDecoder(tiny_model(GREY), record=True)
    cuda.fails = fails
    with pytest.raises(error, match=message) as raised:
        _draw(decoder.model, decoder, 0, 0)
    assert "replay" not in cuda.events
    assert (cuda.current, cuda.stream, cuda.capturing) == (0, cuda.defaults[0], False)
    if error is UserError:
        assert "set IMAGEGEN_CUDA_GRAPHS=0 and run this again" in str(raised.value)
        assert "\n" not in str(raised.value)


def test_graphs_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMAGEGEN_CUDA_GRAPHS", "0")
    assert why_not(tiny_model(GREY)) == "IMAGEGEN_CUDA_GRAPHS=0"


@pytest.fixture
def sync_debug_mode(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    return sync_debug_modes(monkeypatch)


@needs_fake_cuda
@pytest.mark.parametrize("name", [*sorted(GROWING), *MODELS])
def test_no_step_waits_for_a_cuda_device(name: str, sync_debug_mode: list[object]) -> None:
    """Tensors on a CUDA device that is not there refuse what such a device could not do."""
    spec, options = MODELS.get(name) or (GREY, {"attention": CONFIGS[name], "n_layers": 3})
    model = tiny_model(spec, **options)
    with FakeTensorMode():
        to_fake_cuda(model)
        assert model.device.type == "cuda"
        reason = why_not(model)
    if name in GROWING:
        assert "grows" in str(reason)
        return
    assert reason is None
    assert sync_debug_mode == [0, "error", 0]


WAITING: dict[str, Callable[[Tensor, Tensor], object]] = {
    "a number": lambda x, position: position.item(),
    "a comparison": lambda x, position: 1 if position > 2 else 0,
    "a least number": lambda x, position: min(position, 3),
    "an index": lambda x, position: x[:, position],
    "a place to write to": lambda x, position: x.clone()[:, position].fill_(0),
    "a slice": lambda x, position: x[:, :position],
    "a mask": lambda x, position: x[x > 0],
    "a mask to write to": lambda x, position: x.clone().index_put_((x > 0,), x.new_zeros(())),
    "places": lambda x, position: x.nonzero(),
    "different values": lambda x, position: x.unique(),
}


@pytest.mark.parametrize("kind", WAITING)
def test_a_step_that_waits_is_not_recorded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(GREY, **_attention("local.LocalAttention", window=3))

    def waits(ring: Tensor, new: Tensor, length: Any) -> Tensor:
        if isinstance(length, Tensor):
            WAITING[kind](new.flatten(1), length)
        return ring_step(ring, new, length)

    assert why_not(model) is None
    monkeypatch.setattr(local, "ring_step", waits)
    reason = str(why_not(model))
    assert reason.startswith("a step cannot be recorded: aten.")
    assert reason.endswith("waits for the device")
    with pytest.raises(ValueError, match="cannot be recorded"):
        GraphDecoder(model)


@needs_fake_cuda
def test_copies_between_devices_wait(sync_debug_mode: list[object]) -> None:
    with FakeTensorMode():
        x = torch.ones(3, device="cuda")
        for copy in (x.cpu, lambda: torch.zeros(3).copy_(x), lambda: x.copy_(torch.zeros(3))):
            with pytest.raises(Waits, match="copy"), no_waiting(x.device):
                copy()
        with no_waiting(x.device):
            x.double().copy_(x.to(x.device))
    assert sync_debug_mode == [0, *("error", 0) * 4]


def test_a_step_that_no_tensor_position_can_take_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(ring: Tensor, new: Tensor, length: Any) -> Tensor:
        if isinstance(length, Tensor):
            raise TypeError
        return ring_step(ring, new, length)

    model = tiny_model(GREY, **_attention("local.LocalAttention", window=3))
    monkeypatch.setattr(local, "ring_step", refuses)
    assert why_not(model) == "a step cannot be recorded: TypeError"
