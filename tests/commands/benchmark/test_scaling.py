"""The scaling benchmark: what it measures, what it writes, what it refuses and tells."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from imagegen.cli.entry import PROJECT_ROOT, compose
from imagegen.commands.benchmark import plot, worker
from imagegen.commands.benchmark.contestants import choose_mechanisms, typed
from imagegen.commands.benchmark.measure import Plan, Point, measure
from imagegen.commands.benchmark.scaling import growth, main, markdown, tabled
from imagegen.commands.benchmark.training_step import TrainingStep, return_free_memory, row_length
from imagegen.commands.benchmark.worker import (
    Measured,
    ResidentMemory,
    Worker,
    WorkerFailed,
    meter_for,
)
from imagegen.core.errors import UserError

SMALL = ["d_model=16", "n_heads=2", "lengths=[128,64]", "repeats=2", "threads=1", "device=cpu"]


def command(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "imagegen", "benchmark", *argv],
        cwd=cwd,
        env={"PYTHONPATH": str(PROJECT_ROOT), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The real command's folder, and what it printed."""
    folder = tmp_path_factory.mktemp("scaling")
    chosen = "mechanisms=[softmax,{name:linear,chunk_size:16}]"
    return folder / "out", command("scaling", chosen, *SMALL, "out=out", cwd=folder)


def test_command_writes_what_it_measured(done: tuple[Path, Any]) -> None:
    out, process = done
    assert process.returncode == 0, process.stderr
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert process.stderr.startswith("64 positions: 2 measured\n128 positions: 2 measured\n")
    assert "2 mechanisms at 2 lengths in " in process.stdout
    names = {path.name for path in out.iterdir()}
    assert {"scaling.json", "scaling.md"} <= names <= {"scaling.json", "scaling.md", "scaling.png"}

    result = json.loads((out / "scaling.json").read_text())
    assert result["model"] == {
        "n_layers": 2,
        "d_model": 16,
        "n_heads": 2,
        "d_ff": 64,
        "batch_size": 1,
        "dtype": "float32",
        "seed": 0,
    }
    assert result["threads"] == 1
    assert result["device"] == "cpu"
    assert result["torch_version"] == torch.__version__
    assert result["plan"]["lengths"] == [64, 128]
    assert result["machine"]["cores"] >= 1
    settings = result["machine"]["settings"]
    assert settings["OMP_NUM_THREADS"] == "1"
    assert [each["name"] for each in result["mechanisms"]] == ["softmax", "linear chunk_size=16"]
    assert result["mechanisms"][1]["attention"]["chunk_size"] == 16
    for each in result["mechanisms"]:
        assert [point["length"] for point in each["points"]] == [64, 128]
        for point in each["points"]:
            steps = [point["warm_up"], *point["repeats"]]
            assert len(steps) == 3
            assert all(step["seconds"] > 0 and step["cpu_seconds"] > 0 for step in steps)
            assert all(isinstance(step["peak_bytes"], int) for step in steps)
            assert point["seconds"] == statistics.median(step["seconds"] for step in steps[1:])
            peak = statistics.median(step["peak_bytes"] for step in steps)
            assert point["peak_bytes"] == peak
            assert point["not_measured"] is None
    table = (out / "scaling.md").read_text()
    assert "| mechanism | 64 | 128 | a doubling |" in table
    assert table.count("| linear chunk_size=16 |") == 2
    assert "Not measured" not in table


def test_command_plots(done: tuple[Path, Any]) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib (extra `plot`)")
    assert (done[0] / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_plot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with suppress(ImportError):
        import matplotlib.figure  # noqa: F401 (a part that is loaded is not the package)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot.plot({}) is None
    (tmp_path / "scaling.png").touch()  # of an earlier result
    main(compose("benchmark_scaling", ["mechanisms=linear", *SMALL, f"out={tmp_path}"]))
    assert {path.name for path in tmp_path.iterdir()} == {"scaling.json", "scaling.md"}
    assert "pip install -e '.[plot]'" in capsys.readouterr().out


def test_frame_lists_and_refuses_sub_commands(tmp_path: Path) -> None:
    bare, asked = command(cwd=tmp_path), command("--help", cwd=tmp_path)
    assert bare.returncode == asked.returncode == 0
    assert bare.stdout == asked.stdout
    assert "\n  scaling   time and memory of a training step" in bare.stdout
    wrong = command("scalling", "out=x", cwd=tmp_path)
    assert wrong.returncode == 1
    assert wrong.stderr == (
        "error: there is no benchmark 'scalling'; did you mean scaling? choose one of generate, "
        "train, peer, scaling.\n"
    )


def test_mistyped_option_is_refused_on_the_command_line(tmp_path: Path) -> None:
    wrong = command("scaling", "mechanism=[linear]", cwd=tmp_path)
    assert wrong.returncode == 1
    assert "did you mean mechanisms?" in wrong.stderr
    assert wrong.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["mechanisms=[linaer]"], r"holds linaer, .* did you mean linear\? choose from delta, gat"),
        (["mechanisms=[]"], "mechanisms is an empty list"),
        (["mechanisms=[linear,linear]"], "holds linear twice"),
        (["mechanisms=[{name:lsh,round:4}]"], "round"),
        (
            ["mechanisms=[{name:local,window:x}]"],
            "LocalAttention takes window as a whole number, not 'x'",
        ),
        (["mechanisms=[{name:local,window:0}]"], "window=0"),
        (["mechanisms=[linear]", "n_heads=3"], "n_heads=3 does not divide d_model=16"),
        (["lengths=[64,0]"], "lengths=0, but it must be a whole number of at least 1"),
        (["lengths=[]"], "lengths is an empty list"),
        (["repeats=0"], "repeats=0, but"),
        (["budget=0"], "budget=0, but it must be a number above 0"),
        (["time_limit=-1"], "time_limit=-1, but"),
        (["threads=0"], "threads=0, but"),
        (["device=gpu"], "device=gpu is unknown"),
        (["out=file/x"], "cannot write .*file/x"),
        (["out=full"], "full holds other files"),
    ],
)
def test_refusals_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(UserError, match=sentence):
        main(compose("benchmark_scaling", [*SMALL, "out=out", *overrides]))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "thesis.tex"]


def test_a_run_in_which_all_fails_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "imagegen.commands.benchmark.scaling.check_mechanism", lambda *args, **kwargs: None
    )
    wrong = "mechanisms=[{name:local,window:0}]"
    with pytest.raises(UserError, match=r"nothing could be measured: failed at 64: .*window=0"):
        main(compose("benchmark_scaling", [*SMALL, wrong, f"out={tmp_path / 'out'}"]))
    assert list(tmp_path.iterdir()) == []


def test_all_mechanisms_are_measured_by_default() -> None:
    names = [mechanism.name for mechanism in choose_mechanisms(None)]
    assert names[0] == "softmax"
    assert len(set(names)) == len(names)
    for name in (
        *(f"linear feature_map={name}" for name in ("elu", "favor", "polynomial2", "taylor2")),
        *("lsh rounds=1", "lsh rounds=4", "gated_delta gate=head", "gated_delta gate=channel"),
        "hybrid pattern=[linear,{name:local,window:64}]",
        *("local", "strided", "retention", "ssd", "gla", "delta"),
    ):
        assert name in names
    known = {path.stem for path in (PROJECT_ROOT / "conf" / "attention").glob("*.yaml")}
    assert {name.split()[0] for name in names} == known


def test_a_single_mechanism_and_its_options_as_typed() -> None:
    (mechanism,) = choose_mechanisms({"name": "linear", "chunk_size": 16, "n_features": None})
    assert mechanism.name == "linear chunk_size=16 n_features=null"
    assert mechanism.config["_target_"] == "imagegen.attention.linear.LinearAttention"
    assert mechanism.config["chunk_size"] == 16
    assert typed([True, {"a": [1]}]) == "[true,{a:[1]}]"


LENGTHS = [1024, 2048, 4096, 8192, 16384]


@pytest.mark.parametrize(("power", "factor"), [(1, 2.0), (1.5, 2**1.5), (2, 4.0)])
def test_growth_of_powers(power: float, factor: float) -> None:
    assert growth([(n, 3e-5 * n**power) for n in LENGTHS]) == pytest.approx(factor, rel=1e-12)


def test_growth_is_exactly_two_for_linear_data() -> None:
    assert growth([(n, 7 * n) for n in LENGTHS]) == 2


def test_growth_looks_at_the_last_three_doublings() -> None:
    assert growth([(1, 1000.0), (2, 1.0), (4, 5.0), (8, 2.0), (16, 8.0)]) == pytest.approx(2)
    assert growth([(2, 1.0), (4, 3.0)]) == pytest.approx(3)
    assert growth([(100, 1.0), (400, 9.0)]) == pytest.approx(3)


@pytest.mark.parametrize("values", [[], [(4, 1.0)], [(1, 5.0), (100, 6.0)], [(4, 0.0), (8, 1.0)]])
def test_growth_of_too_little_is_unknown(values: list[tuple[int, float]]) -> None:
    assert growth(values) is None


class Fake:
    """A runner whose steps take the seconds given, or fail where there are none left."""

    def __init__(self, log: list[str], name: str, seconds: Sequence[float], broken: bool) -> None:
        self.log, self.name, self.seconds, self.broken = log, name, list(seconds), broken
        self.closed = False

    def ready(self) -> None:
        self.log.append(f"ready {self.name}")
        if self.broken:
            raise WorkerFailed("it is broken")

    def step(self) -> Measured:
        self.log.append(f"step {self.name}")
        if not self.seconds:
            raise WorkerFailed("no memory")
        return Measured(self.seconds.pop(0), 0.5, 1000 * len(self.seconds))

    def close(self) -> None:
        assert not self.closed
        self.closed = True


def plan_of(
    lengths: tuple[int, ...], repeats: int, budget: float, time_limit: float, room: int = 10**9
) -> Plan:
    return Plan(lengths, repeats, budget, time_limit, memory_bytes=room, guess_bytes=100)


def fakes(
    steps: dict[tuple[str, int], Sequence[float]], plan: Plan, broken: str = ""
) -> tuple[dict[str, list[Point]], list[str], list[str]]:
    """What is measured, in which order, and what is told."""
    log: list[str] = []
    told: list[str] = []
    runners: list[Fake] = []

    def start(name: str, length: int) -> Fake:
        runners.append(Fake(log, name, steps[name, length], name == broken))
        return runners[-1]

    points = measure(list(dict.fromkeys(n for n, _ in steps)), plan, start, told.append)
    assert all(runner.closed for runner in runners)
    return points, log, told


def test_mechanisms_take_turns() -> None:
    steps = {("a", 8): [9.0, 1.0, 3.0], ("b", 8): [7.0, 2.0, 2.0]}
    points, log, told = fakes(steps, plan_of((8,), repeats=2, budget=100, time_limit=100))
    assert log == ["ready a", "ready b", *["step a", "step b"] * 3]
    assert points["a"][0].seconds == 2.0
    assert points["a"][0].warm_up == Measured(9.0, 0.5, 2000)
    assert points["a"][0].peak_bytes == 1000  # of 2000, 1000 and 0
    assert told == ["8 positions: 2 measured"]


def test_one_after_the_other() -> None:
    steps = {("a", 8): [1.0, 1.0], ("b", 8): [1.0, 1.0]}
    plan = plan_of((8,), repeats=1, budget=100, time_limit=100, room=0)
    assert fakes(steps, plan)[1] == [*["ready a", *["step a"] * 2], *["ready b", *["step b"] * 2]]


def test_as_many_take_turns_as_fit_into_memory() -> None:
    # 100 bytes a position are expected at first; then a peak of 500 at 2 positions is known.
    steps = {(name, n): [1.0, 1.0] for name in "abc" for n in (2, 8)}
    plan = plan_of((2, 8), repeats=1, budget=100, time_limit=100, room=4000)
    log = fakes(steps, plan)[1]
    a, b, c = (f"step {name}" for name in "abc")
    turns = [entry for entry in log if entry.startswith("step")]
    assert turns == [a, b, c, a, b, c, *[a, b, a, b], *[c, c]]


def test_long_steps_are_not_repeated() -> None:
    steps = {("a", 8): [3.0, 2.5, 9.0], ("b", 8): [6.0, 9.0, 9.0]}
    points, log, _ = fakes(steps, plan_of((8,), repeats=2, budget=5, time_limit=100))
    assert log.count("step a") == 2
    assert log.count("step b") == 1
    assert points["a"][0].seconds == 2.5
    assert (points["b"][0].seconds, points["b"][0].warm_up) == (6.0, None)


def test_longer_lengths_are_skipped_after_the_time_limit() -> None:
    steps = {(name, n): [t * n] * 2 for name, t in (("a", 1.0), ("b", 0.1)) for n in (8, 16, 32)}
    points, log, told = fakes(steps, plan_of((8, 16, 32), repeats=1, budget=99, time_limit=10))
    assert [point.seconds for point in points["a"]] == [8.0, 16.0, None]
    assert [point.seconds for point in points["b"]] == pytest.approx([0.8, 1.6, 3.2])
    reason = "longer lengths are skipped, because a step at 16 took 16 s, more than time_limit=10"
    assert points["a"][2].reason == reason
    assert f"a: {reason}" in told
    assert log.count("ready a") == 2


def test_what_is_refused_is_told_and_the_rest_goes_on() -> None:
    steps = {(name, n): [1.0, 1.0] for name in "ab" for n in (8, 16, 32)}
    told: list[str] = []
    seen: list[tuple[str, int, list[float | None]]] = []

    def refuse(name: str, length: int, points: Sequence[Point]) -> str | None:
        seen.append((name, length, [point.seconds for point in points]))
        return "too large" if (name, length) == ("a", 16) else None

    points = measure(
        ["a", "b"],
        plan_of((8, 16, 32), repeats=1, budget=99, time_limit=99),
        lambda name, length: Fake([], name, steps[name, length], False),
        told.append,
        refuse,
    )
    assert [point.seconds for point in points["a"]] == [1.0, None, 1.0]
    assert [point.seconds for point in points["b"]] == [1.0, 1.0, 1.0]
    assert points["a"][1].reason == "too large"
    assert seen[-2] == ("a", 32, [1.0, None])
    assert told == [
        "8 positions: 2 measured",
        "a at 16: too large",
        "16 positions: 1 measured",
        "32 positions: 2 measured",
    ]


class Convolutions:
    """A job that says whether a GPU would compute float32 convolutions in TF32."""

    threads, device = 1, "cpu"

    def prepare(self) -> Any:
        return lambda: [float(torch.backends.cudnn.allow_tf32)]


@pytest.mark.parametrize("allowed", [False, True])
def test_workers_compute_as_other_commands_do(
    monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", not allowed)
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", str(int(allowed)))
    before = torch.get_float32_matmul_precision()
    go, _ = worker._prepared(Convolutions())
    torch.set_float32_matmul_precision(before)
    assert go() == [float(allowed)]


@pytest.mark.parametrize(("broken", "why"), [("", "no memory"), ("a", "it is broken")])
def test_failures_are_told_and_end_a_mechanism_alone(broken: str, why: str) -> None:
    steps: dict[tuple[str, int], Sequence[float]] = {
        **{("a", n): [1.0] if n == 8 else [1.0, 1.0] for n in (8, 16)},
        **{("b", n): [1.0, 1.0] for n in (8, 16)},
    }
    plan = plan_of((8, 16), repeats=1, budget=99, time_limit=99)
    points, _, told = fakes(steps, plan, broken)
    assert points["a"][0].reason == f"failed at 8: {why}"
    assert points["a"][1].reason == f"skipped, because it failed at 8: {why}"
    assert [point.seconds for point in points["a"]] == [None, None]
    assert [point.seconds for point in points["b"]] == [1.0, 1.0]
    assert told[0] == f"a: failed at 8: {why}"

    result = {
        "model": {"n_layers": 2, "d_model": 8, "n_heads": 2, "batch_size": 1, "dtype": "float32"},
        "machine": {"gpu": None, "processor": "abacus"},
        "threads": 1,
        "memory_meter": "scales",
        "torch_version": "2",
        "imagegen_version": "0",
        "plan": {"lengths": [8, 16], "repeats": 1, "budget": 99.0, "memory_bytes": 2**31},
        "mechanisms": [{"name": name, **tabled(each)} for name, each in points.items()],
    }
    table = markdown(result)
    assert "| a | – | – | – |" in table
    assert "| b | 1,000 | 1,000 | ×1.00 |" in table
    assert f"- a at 8: failed at 8: {why}.\n- a at 16: skipped, because it failed" in table


def test_a_worker_says_why_it_failed() -> None:
    job = TrainingStep({"_target_": "os.system"}, 64, 8, 2, 1, seed=0, threads=1, device="cpu")
    worker = Worker(job)
    try:
        with pytest.raises(WorkerFailed, match=r"_target_ 'os.system' is not one of imagegen's"):
            worker.ready()
    finally:
        worker.close()


def test_a_worker_that_dies_is_told() -> None:
    target = {"_target_": "imagegen.attention.linear.LinearAttention"}
    worker = Worker(TrainingStep(target, 64, 8, 2, 1, seed=0, threads=1, device="cpu"))
    try:
        worker.ready()
        worker._process.kill()
        worker._process.join()
        with pytest.raises(WorkerFailed, match="ended by SIGKILL, as happens where memory runs"):
            worker.step()
    finally:
        worker.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_meter_sees_a_tensor_that_is_gone_again() -> None:
    size = 64 * 2**20
    # A hole in the heap, as earlier tests may leave one: the tensor would be put into it.
    pieces = [torch.ones(2**14, dtype=torch.uint8) for _ in range(size // 2**13)]
    keeper = pieces.pop()
    del pieces
    for _ in range(2):
        return_free_memory()
        meter = meter_for(torch.device("cpu"))
        assert isinstance(meter, ResidentMemory)
        meter.reset()
        assert meter.peak() < size / 10
        tensor = torch.ones(size, dtype=torch.uint8)
        del tensor
        assert meter.peak() == pytest.approx(size, rel=0.2)
    del keeper


@pytest.mark.parametrize(("length", "row"), [(1, 1), (64, 8), (65, 9), (2048, 46), (65536, 256)])
def test_rows_of_square_images(length: int, row: int) -> None:
    assert row_length(length) == row
