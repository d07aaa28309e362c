"""The benchmark of generation: what it times, what it computes from that, what it writes."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from imagegen.cli.entry import compose
from imagegen.commands.benchmark import common, generate, generation_step, plot
from imagegen.commands.benchmark.common import ratio, spread, too_much
from imagegen.commands.benchmark.contestants import DRAWERS, Drawer
from imagegen.commands.benchmark.generate import positions_of, run, seconds_together
from imagegen.commands.benchmark.generate_report import markdown
from imagegen.commands.benchmark.generation_step import Ceilings, GenerationStep
from imagegen.commands.benchmark.setting import Costs, Setting
from imagegen.commands.benchmark.tables import ranged
from imagegen.core.errors import UserError
from imagegen.core.values import plain
from imagegen.generation.decode import Decoder
from tests.helpers import tree

SIZES = ["n_layers=1", "d_model=16", "n_heads=2", "head_dim=8", "d_ff=16"]
SMALL = [
    *(f"model.{size}" for size in SIZES),
    *("steps=3", "repeats=2", "threads=1", "device=cpu"),
]


def setting_of(*overrides: str) -> Setting:
    return Setting.from_config(plain(compose("benchmark_generate", list(overrides))), 0)


def tiny_setting(**options: Any) -> Setting:
    """Images of 256 steps: the fewest that have a compiled loop."""
    small = setting_of(*SMALL)
    spec = {"height": 16, "width": 16, "channels": 3, "levels": 256}
    return Setting(spec, {**small.model, "tokens": "pixel", **options}, 0)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The command's folder, and what it returned."""
    out = tmp_path_factory.mktemp("generate") / "out"
    chosen = "contestants=[linear,softmax_step,softmax_recomputed]"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "MATRIX", 64)
        patch.setattr(generate, "COPIED", 2**16)
        options = [*SMALL, chosen, "batch_sizes=[2,1]", f"out={out}"]
        yield out, run(compose("benchmark_generate", options))


def test_command_writes_what_it_measured(done: tuple[Path, dict[str, Any]]) -> None:
    out, returned = done
    assert {path.name for path in out.iterdir()} - {"generate.png"} == {
        "generate.json",
        "generate.md",
    }
    result = json.loads((out / "generate.json").read_text())
    assert result == json.loads(json.dumps(returned))
    assert result["positions"] == [10, 390, 780]
    assert (result["threads"], result["device"], result["paper"]) == (1, "cpu", None)
    assert result["model"]["d_model"] == 16
    assert result["costs"]["length"] == 784
    ceilings = result["ceilings"]
    assert ceilings["flops"] > 0
    assert ceilings["bytes"] > 0
    assert [one["name"] for one in result["contestants"]] == [
        "linear",
        "softmax_step",
        "softmax_recomputed",
    ]
    assert [one["state_bytes"] for one in result["contestants"]] == [576, 4 * 2 * 16 * 784, 0]
    costs = Costs(**result["costs"])
    for one in result["contestants"]:
        assert [batch["batch_size"] for batch in one["batches"]] == [1, 2]
        for batch in one["batches"]:
            assert batch["not_measured"] is None
            assert len(batch["repeats"]) == 2
            parts = [repeat["parts"] for repeat in batch["repeats"]]
            assert all(len(each) == 3 and min(each) > 0 for each in parts)
            seconds = [seconds_together([10, 390, 780], each, 3, 784) for each in parts]
            size = batch["batch_size"]
            assert batch["seconds_for_batch"] == spread(seconds)
            assert batch["images_per_second"] == spread([size / each for each in seconds])
            assert batch["ms_a_step"]["least"] == pytest.approx(1e3 * min(seconds) / 784)
            assert batch["ms_a_step_at"][2]["most"] == 1e3 * max(each[2] for each in parts)
            rate = size / np.median(seconds)
            flops = rate * costs.flops_an_image(one["attention"])
            assert batch["share_of_arithmetic"] == pytest.approx(flops / ceilings["flops"])
            assert isinstance(batch["peak_bytes"], int)
        rates = {b["batch_size"]: b["images_per_second"]["median"] for b in one["batches"]}
        assert one["best_batch_size"] == max(rates, key=lambda size: rates[size])
    table = (out / "generate.md").read_text()
    assert table == markdown(result)
    assert table.count("| softmax, cached, PyTorch step |") >= 4
    assert "Not measured" not in table
    assert "Beside the paper" not in table


def test_command_plots(done: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib (extra `plot`)")
    assert (done[0] / "generate.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plot.plot_generation(done[1]) is None


def test_the_paper_stands_beside_its_models(done: tuple[Path, dict[str, Any]]) -> None:
    result = copy.deepcopy(done[1])
    for images, rows in {
        "mnist": ("| linear | 142.8 | ", " | 5.5 | ", " | 7.3 | "),
        "cifar10": ("| linear | 17.85 | ", " | 45.1 | ", " | 61.3 | "),
    }.items():
        result["paper"] = images
        table = markdown(result)
        (row,) = (line for line in table.splitlines() if line.startswith(rows[0]))
        ours = result["contestants"][0]
        best = next(b for b in ours["batches"] if b["batch_size"] == ours["best_batch_size"])
        for text in (*rows, ranged(best["images_per_second"])):
            assert text in row
        latency = ranged(ours["batches"][0]["seconds_for_batch"])
        assert row.endswith(f"{rows[1]}{latency}{rows[2]}– |")
        result["machine"]["gpu"] = "a GPU"
        (row,) = (line for line in markdown(result).splitlines() if line.startswith(rows[0]))
        assert row.endswith(f"{rows[1]}–{rows[2]}{latency} |")
        result["machine"]["gpu"] = None
        assert "| LSH-1 | " in table
        assert "- images/s: theirs on a GPU, each row at a batch size of its own" in table


@pytest.mark.parametrize("name", [n for n, drawer in DRAWERS.items() if drawer.form != "peer"])
@pytest.mark.parametrize("tokens", ["pixel", "subpixel"])
def test_every_contestant_times_steps_at_each_position(name: str, tokens: str) -> None:
    job = GenerationStep(
        DRAWERS[name], tiny_setting(tokens=tokens), 2, (0, 7, 200), 2, 0.5, threads=1, device="cpu"
    )
    seconds = job.prepare()()
    assert len(seconds) == 3
    assert all(0 < each < 5 for each in seconds)


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_states_are_as_a_prefix_leaves_them(attention: str) -> None:
    model = tiny_setting().build(attention)
    with torch.inference_mode():
        prefix = torch.zeros(2, 20, 3, dtype=torch.uint8)
        parameters, known = model.prefill(prefix)
        filled, drawn_from = generation_step._filled(model, 2, 20, 50)
    assert filled.position == known.position == 21
    assert drawn_from.shape == parameters.shape
    assert filled.recent.shape == known.recent.shape
    for ours, layer in zip(filled.layers, known.layers, strict=True):
        if attention == "softmax":
            assert ours.length == layer.length == 21
            assert ours.keys.shape == (2, 2, 128, 8)
        else:
            assert [t.shape for t in ours.tensors()] == [t.shape for t in layer.tensors()]


def test_a_piece_makes_its_steps_and_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(generation_step, "time", clock)
    calls = []

    def step() -> None:
        calls.append(now[0])
        now[0] += 0.25

    def job(steps: int, piece: float) -> GenerationStep:
        drawer = DRAWERS["linear_step"]
        return GenerationStep(drawer, tiny_setting(), 1, (0,), steps, piece, 1, "cpu")

    assert job(4, 9.0)._timed(step) == 0.25
    assert len(calls) == 4
    assert job(4, 0.3)._timed(step) == 0.25
    assert len(calls) == 6
    assert job(4, 0.1)._timed(step) == 0.25
    assert len(calls) == 7


@pytest.mark.parametrize("told", [False, True])
def test_steps_of_the_compiled_loop_without_what_a_call_takes(
    told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(generation_step, "time", clock)
    seen = []

    class Fake(Decoder):
        def draw(
            self,
            state: Any,
            parameters: Any,
            sequence: Any,
            noise: Any,
            controls: Any,
            progress: Any = None,
        ) -> None:
            steps = sequence.shape[1] - state.position
            seen.append((state.position, sequence.shape, noise.shape))
            now[0] += 1.0 + 0.25 * steps
            if (
                told
            ):  # by a decoder that tells its loop from copying, which takes now more, now less
                now[0] += 50.0 * (len(seen) % 3)
                self.loop_seconds = 1.0 + 0.25 * steps

        def parameters(self, sequence: Any, context: Any = None) -> Any:
            raise NotImplementedError

    monkeypatch.setattr(generation_step, "choose_decoder", lambda *_: Fake())
    job = GenerationStep(DRAWERS["linear"], tiny_setting(), 2, (7, 100), 8, 1.0, 1, "cpu")
    assert job.prepare()() == [0.25, 0.25]
    # A step takes a quarter of a second, so that a piece of a second has four.
    assert seen[3] == (8, (2, 12, 3), (2, 5, 4))
    assert max(shape[1] for _, shape, _ in seen) == 105


def test_ceilings_are_timed() -> None:
    product, copied = Ceilings(16, 2**10, threads=1, device="cpu").prepare()()
    assert product > 0
    assert copied > 0


def test_seconds_of_an_image_from_a_few_positions() -> None:
    assert seconds_together([3], [0.5], 1, 10) == 5.0
    # Middles at 1 and 9, between them 2 + n.
    assert seconds_together([0, 8], [3.0, 11.0], 1, 11) == pytest.approx(
        3 + sum(2 + n for n in range(1, 10)) + 11
    )


def test_positions_by_number_and_word() -> None:
    assert positions_of(["last", 10, "middle", 10], 32, 784) == (10, 375, 751)
    assert positions_of(0, 4, 6) == (0,)
    assert positions_of("last", 1, 2) == (0,)


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_costs_are_those_of_the_model(attention: str) -> None:
    model = tiny_setting(n_layers=2).build(attention)
    costs = Costs.of(model)
    with torch.inference_mode():
        _, state = model.prefill(torch.zeros(1, costs.length - 1, 3, dtype=torch.uint8))
    found = sum(tensor.nbytes for layer in state.layers for tensor in layer.tensors())
    assert costs.state_bytes(attention) == found
    # Query, key, value, out; up and down; the mixture's 100 numbers.
    assert costs.weights == 2 * (4 * 16 * 16 + 2 * 16 * 16) + 16 * 100


def test_flops_and_bytes_by_hand() -> None:
    costs = Costs(length=9, weights=100, layers=2, heads=3, features=4)
    assert costs.flops_an_image("linear") == 9 * (200 + 4 * 2 * 3 * 4 * 4)
    # 1 to 9 positions are looked at, 5 on average.
    assert costs.flops_an_image("softmax") == 9 * (200 + 4 * 2 * 3 * 4 * 5)
    assert costs.bytes_an_image("linear", 10) == 9 * (40 + 2 * costs.state_bytes("linear"))
    assert costs.bytes_an_image("softmax", 1) == 9 * (400 + costs.state_bytes("softmax") / 2)


@pytest.mark.parametrize(
    ("overrides", "paper"),
    [
        ([], "mnist"),
        (["dataset=cifar10", "model.n_layers=16"], "cifar10"),
        (["dataset=cifar10"], None),
        (["model=default"], None),
        (["model.d_ff=512"], None),
    ],
)
def test_the_papers_models_are_known(overrides: list[str], paper: str | None) -> None:
    assert setting_of(*overrides).paper == paper


def test_ratios_have_the_widest_spread() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "least": 1.0, "most": 3.0}
    assert ratio(spread([8.0, 4.0, 6.0]), spread([1.0, 2.0, 4.0])) == {
        "median": 3.0,
        "least": 1.0,
        "most": 8.0,
    }


def test_what_would_take_too_much_is_refused() -> None:
    assert too_much(None, 1.0, 5, None) is None
    assert too_much(0.9, 1.0, 5, 5) is None
    reason = too_much(1.5, 1.0, 5, 5)
    assert reason == "skipped, because it would take about 1.5 s, more than time_limit=1"
    reason = too_much(None, 1.0, 2**31, 2**30)
    assert reason == (
        "skipped, because it would need about 2 GiB, more than half of the memory (1 GiB)"
    )


def test_what_does_not_fit_is_told_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "MATRIX", 64)
    monkeypatch.setattr(generate, "COPIED", 2**16)
    # The cache of a batch of two does not fit; that of one does.
    room = 3 * 2 * 4 * 2 * 16 * 784 / 2
    monkeypatch.setattr(common, "half_of_memory", lambda *_: int(room))
    chosen = ["contestants=[softmax_step]", "batch_sizes=[1,2]", f"out={tmp_path / 'out'}"]
    result = run(compose("benchmark_generate", [*SMALL, *chosen]))
    first, second = result["contestants"][0]["batches"]
    assert first["images_per_second"]["median"] > 0
    assert second["images_per_second"] is None
    assert "more than half of the memory" in second["not_measured"]
    table = (tmp_path / "out" / "generate.md").read_text()
    assert "- softmax, cached, PyTorch step at 2: skipped, because it would need" in table
    assert result["contestants"][0]["best_batch_size"] == 1


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["contestants=[linaer]"],
            r"holds linaer, which does not exist; did you mean linear\? choose",
        ),
        (["contestants=[]"], "contestants is an empty list"),
        (["contestants=[linear,linear]"], "holds linear twice"),
        (["batch_sizes=[]"], "batch_sizes is an empty list"),
        (["batch_sizes=[0]"], "batch_sizes=0, but"),
        (["positions=[soon]"], "positions holds soon; it takes numbers, middle and last"),
        (["positions=[]"], "positions is an empty list"),
        (["positions=[783]"], "positions=783, but it must be a whole number from 0 to 780"),
        (["steps=784"], "steps=784, but an image has 784"),
        (["steps=0"], "steps=0, but"),
        (["piece=0"], "piece=0, but"),
        (["model.n_heads=3", "model.head_dim=null"], "n_heads=3 does not divide d_model=16"),
        (["model.conditional=true"], "model.conditional=true is not measured"),
        (["device=gpu"], "device=gpu is unknown"),
    ],
)
def test_refusals_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=sentence):
        run(compose("benchmark_generate", [*SMALL, "out=out", *overrides]))
    assert tree(tmp_path) == set()


def test_a_peer_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imagegen.commands.benchmark.peer_library.is_installed", lambda: False)
    with pytest.raises(UserError, match="holds peer_linear, but pytorch-fast-transformers is not"):
        run(compose("benchmark_generate", [*SMALL, "contestants=[peer_linear]"]))
    options = generate.GenerateOptions.from_config(plain(compose("benchmark_generate", SMALL)))
    assert list(options.contestants) == [name for name in DRAWERS if "peer" not in name]


def test_a_model_without_a_compiled_loop_is_told() -> None:
    spec = {"height": 4, "width": 4, "channels": 1, "levels": 256}
    small = Setting(spec, tiny_setting().model, 0)
    drawer = Drawer("linear", "linear", "compiled")
    with pytest.raises(UserError, match="no compiled loop for images of fewer than 256 steps"):
        GenerationStep(drawer, small, 1, (0,), 1, 1.0, 1, "cpu").prepare()
