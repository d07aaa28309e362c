"""What is decided about the machine, with each decision forced, and that records keep it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning.plugins import MixedPrecision

from imagegen.checkpoint.reading import KEY
from imagegen.cli.entry import PROJECT_ROOT, compose
from imagegen.commands import machine as command
from imagegen.core import machine
from imagegen.core.errors import UserError
from imagegen.core.machine import Choice, bf16, describe, prepare, training_precision, usable_cpus
from imagegen.core.values import plain
from imagegen.heads.base import OutputHead
from imagegen.heads.categorical import Categorical
from imagegen.heads.mixture_of_logistics import MixtureOfLogistics
from imagegen.training.learning_rate import _relevant
from tests.helpers import manifest, run_train, sample

CPU = torch.device("cpu")
SHORT = [
    "logger=none",
    "callbacks.grids=null",
    "model.n_layers=1",
    "model.d_model=16",
    "trainer.limit_train_batches=2",
    "trainer.limit_val_batches=1",
    "trainer.max_epochs=1",
    "trainer.log_every_n_steps=1",
]


@pytest.fixture(params=[True, False], ids=["bf16", "float32"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A machine with instructions for bfloat16, and one without."""
    monkeypatch.setenv(machine.FORCE_BF16, str(int(request.param)))
    return bool(request.param)


def _options(**options: Any) -> dict[str, Any]:
    return {"precision": "auto", "accelerator": "cpu", "devices": 1, **options}


def _precision(**options: Any) -> str | None:
    found: str | None = training_precision(_options(**options))[0]["precision"]
    return found


def _threads(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let PyTorch have announced so many threads from the start."""
    monkeypatch.setattr(machine, "_announced", lambda: count)
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)


# Arithmetic


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ({"avx2"}, "this CPU has no bfloat16 instructions"),
        ({"avx2", "avx512_bf16"}, "this CPU has AVX512_BF16"),
        ({"avx512_bf16", "amx_bf16"}, "this CPU has AMX"),
        ({"neon", "bf16"}, "this CPU has BF16"),
        (set(), "this CPU has no bfloat16 instructions"),
    ],
)
def test_auto_follows_the_instructions(
    names: set[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(machine.FORCE_BF16, raising=False)
    monkeypatch.setattr(machine, "instruction_sets", lambda: frozenset(names))
    options, choice = training_precision(_options())
    expected = "32-true" if "no " in reason else "bf16-mixed"
    assert options["precision"] == expected
    assert str(choice) == f"{expected}: {reason}"


@pytest.mark.parametrize(
    ("names", "forced", "batch_size", "expected"),
    [
        ({"avx512_bf16"}, None, 1024, "no: this CPU has no AMX"),
        ({"amx_bf16"}, None, 255, "no: AMX, from batches of 256 on"),
        ({"amx_bf16"}, None, 256, "yes: AMX, from batches of 256 on"),
        ({"amx_bf16"}, "0", 256, "no: IMAGEGEN_BF16_DRAWING=0"),
        (set(), "1", 1, "yes: IMAGEGEN_BF16_DRAWING=1"),
    ],
)
def test_large_batches_are_drawn_with_bf16_where_there_is_amx(
    names: set[str],
    forced: str | None,
    batch_size: int,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(machine.FORCE_BF16_DRAWING, raising=False)
    if forced is not None:
        monkeypatch.setenv(machine.FORCE_BF16_DRAWING, forced)
    monkeypatch.setattr(machine, "instruction_sets", lambda: frozenset(names))
    monkeypatch.setattr(machine, "threads", lambda: Choice("2", "so many"))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert str(machine.bf16_drawing(batch_size)) == expected


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("flags\t\t: fpu avx2 sse2\n", False),
        ("flags\t\t: fpu avx2 avx512_bf16\n", True),
        ("flags\t\t: fpu avx2 avx512_bf16x\n", False),
        ("Features\t: fp asimd bf16\n", True),
        (None, False),
    ],
)
def test_linux_is_asked_where_pytorch_cannot_be(
    text: str | None, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(machine.FORCE_BF16, raising=False)
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert (bf16(CPU).value == "yes") is known


def _gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    """Let the Trainer take GPUs of these capabilities."""
    monkeypatch.delenv(machine.FORCE_BF16, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: capabilities[d.index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: f"GPU {d.index}")
    # A copy of what Lightning's Trainer would say, which refuses GPUs that are not there.
    monkeypatch.setattr(
        "pytorch_lightning.Trainer",
        lambda devices, **_: SimpleNamespace(
            strategy=SimpleNamespace(root_device=torch.device("cuda", devices[0])),
            device_ids=devices,
        ),
    )


def test_the_gpus_in_use_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpus(monkeypatch, (7, 5), (9, 0), (8, 0))
    found = {
        devices: str(training_precision(_options(accelerator="gpu", devices=list(devices)))[1])
        for devices in [(0,), (1,), (1, 2), (1, 0)]
    }
    assert found == {
        (0,): "32-true: GPU 0 has compute capability 7.5",
        (1,): "bf16-mixed: GPU 1 has compute capability 9.0",
        (1, 2): "bf16-mixed: GPU 1 has compute capability 9.0",
        (1, 0): "32-true: GPU 0 has compute capability 7.5",
    }


def test_other_devices_keep_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(machine.FORCE_BF16, raising=False)
    assert bf16(torch.device("mps")) == Choice("no", "untested on mps devices")


def test_typed_precisions_stay(instructions: bool) -> None:
    for given in ("32-true", "bf16-mixed", "64-true"):
        assert _precision(precision=given) == given
    assert [_precision(precision=given) for given in (None, 32, "bf16")] == [
        "32-true",
        "32-true",
        "bf16-mixed",
    ]


def test_a_cpu_takes_float16_too(instructions: bool) -> None:
    options, choice = training_precision(_options(precision="16-mixed"))
    assert choice.value == "16-mixed"
    (plugin,) = options["plugins"]
    assert isinstance(plugin, MixedPrecision)
    assert (plugin.precision, options["precision"]) == ("16-mixed", None)
    assert plugin.scaler is not None


def test_a_resumed_run_keeps_its_arithmetic(instructions: bool) -> None:
    for before in ("32-true", "bf16-mixed"):
        options, choice = training_precision(_options(), before)
        assert options["precision"] == before
        assert choice == Choice(before, "as this run began")
    assert training_precision(_options(precision="32-true"), "bf16-mixed")[1].value == "32-true"


def test_tf32_is_typed_and_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="needs an NVIDIA GPU"):
        training_precision(_options(precision="tf32"))
    _gpus(monkeypatch, (8, 0))
    options, choice = training_precision(_options(precision="tf32", devices=[0]))
    assert (options["precision"], choice.value) == ("32-true", "tf32")


def test_float32_is_float32() -> None:
    try:
        for tf32 in (True, False):
            prepare(tf32=tf32)
            assert torch.backends.cuda.matmul.allow_tf32 is tf32
            assert torch.backends.cudnn.allow_tf32 is tf32
            assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
    finally:
        prepare()


def test_trainings_and_the_rate_finder_take_it(instructions: bool) -> None:
    cfg = compose("train", ["trainer=cpu"])
    expected = "bf16-mixed" if instructions else "32-true"
    assert _relevant(plain(cfg.trainer))["precision"] == expected
    for preset in ("mnist_paper", "cifar10_paper"):
        assert compose("train", [f"experiment={preset}"]).trainer.precision == "32-true"


@pytest.mark.parametrize("kind", [Categorical, MixtureOfLogistics])
def test_heads_keep_float32_under_autocast(kind: type[OutputHead]) -> None:
    torch.manual_seed(0)
    head = kind(16, 256)
    hidden = torch.randn(7, 16)
    expected = head(hidden)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(head(hidden), expected)
        assert head(hidden.bfloat16()).dtype == torch.float32


# Threads


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the files in which Linux tells a process its control groups and their limits."""
    monkeypatch.setattr(machine, "_SELF_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(machine, "_affinity", lambda: 64)

    def write(own: str, files: Mapping[str, str]) -> None:
        (tmp_path / "cgroup").write_text(own)
        for name, text in files.items():
            path = tmp_path / "groups" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        # Version 2, as in a container, whose own group is the root that it sees.
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {}, 64),
        # The strictest of the groups above counts.
        (
            "0::/jobs/mine\n",
            {"jobs/cpu.max": "300000 100000\n", "jobs/mine/cpu.max": "max 100000\n"},
            3,
        ),
        # The path of the host, seen from a container.
        ("0::/system.slice/docker-1.scope\n", {"cpu.max": "400000 100000\n"}, 4),
        # Version 1.
        (
            "4:memory:/a\n3:cpu,cpuacct:/pod\n0::/\n",
            {"cpu/pod/cpu.cfs_quota_us": "500000\n", "cpu/pod/cpu.cfs_period_us": "100000\n"},
            5,
        ),
        (
            "1:cpu:/\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            64,
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "?\n", "cpu/cpu.cfs_period_us": "0\n"}, 64),
    ],
)
def test_quotas_are_read(
    own: str, files: dict[str, str], expected: int, cgroups: Callable[..., None]
) -> None:
    cgroups(own, files)
    assert usable_cpus() == expected


def test_affinity_is_read(cgroups: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    cgroups("0::/\n", {"cpu.max": "400000 100000\n"})
    monkeypatch.setattr(machine, "_affinity", lambda: 3)
    assert usable_cpus() == 3


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_affinity_is_that_of_the_process() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert machine._affinity() == 1
        assert usable_cpus() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_no_more_threads_than_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cpus", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    _threads(monkeypatch, 64)
    assert machine.threads() == Choice("2", "OMP_NUM_THREADS says 64, but 2 CPUs can be used")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert machine.threads() == Choice("2", "PyTorch says 64, but 2 CPUs can be used")
    assert machine.threads(2) == Choice("1", "2 processes share 2 CPUs")
    assert machine.threads(5) == Choice("1", "5 processes share 2 CPUs")
    _threads(monkeypatch, 2)
    assert machine.threads() == Choice("2", "2 CPUs can be used")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    _threads(monkeypatch, 1)
    assert machine.threads() == Choice("1", "set by OMP_NUM_THREADS; 2 CPUs can be used")


def test_threads_are_set_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(machine, "usable_cpus", lambda: 2)
    try:
        torch.set_num_threads(5)
        with machine.limited_threads():
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 5
        prepare()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_commands_limit_threads_and_let_them_sleep() -> None:
    """Before PyTorch is imported, which reads the setting once."""
    program = (
        "import sys; sys.argv[1:] = ['ckpt=none']\n"
        "from imagegen.core import machine; import os\n"
        "machine.usable_cpus = lambda: 1\n"
        "import sample\n"
        "assert 'torch' not in sys.modules\n"
        "try: sample.main()\n"
        "except SystemExit: pass\n"
        "import torch\n"
        "print(torch.get_num_threads(), os.environ['GOMP_SPINCOUNT'])\n"
    )
    for typed, expected in (({}, f"1 {machine.SPIN_COUNT}"), ({"GOMP_SPINCOUNT": "7"}, "1 7")):
        environment = {**os.environ, "OMP_NUM_THREADS": "8", **typed}
        environment.pop("OMP_WAIT_POLICY", None)
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            env=environment,
            cwd=PROJECT_ROOT,
        )
        assert done.stdout.strip() == expected, done.stderr


def test_a_policy_stays() -> None:
    environment = {"OMP_WAIT_POLICY": "active"}
    machine.spin_briefly(environment)
    assert environment == {"OMP_WAIT_POLICY": "active"}


# Records


def test_runs_say_and_record_it(
    instructions: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The default training, and what goes on from it on a machine of the other kind."""
    expected, run = ("bf16-mixed" if instructions else "32-true"), tmp_path / "run"
    assert run_train(monkeypatch, *SHORT, f"hydra.run.dir={run}") == 0
    said = capsys.readouterr().out
    assert f"on cpu, {expected}: {machine.FORCE_BF16}={int(instructions)}" in said
    assert "threads 1: " in said
    summary = json.loads((run / "summary.json").read_text())
    assert summary["machine"]["precision"] == expected
    assert summary["machine"]["usable_cpus"] >= 1
    assert summary["machine"]["precision_reason"]
    assert "can be used" in summary["machine"]["threads_reason"]
    assert summary["machine"]["linear_attention"] == "chunks of PyTorch's operations"
    assert summary["machine"]["linear_attention_reason"] == "64 positions, fewer than 128"
    assert summary["machine"]["tf32"] is False
    assert f"precision: {expected}" in (run / "config.yaml").read_text()
    for name in ("best", "last"):
        saved = torch.load(run / f"checkpoints/{name}.ckpt", weights_only=True)[KEY]
        assert saved["machine"]["precision"] == expected
        assert saved["config"]["trainer"]["precision"] == expected
        assert saved["machine"]["processor"] == machine.processor()

    monkeypatch.setenv(machine.FORCE_BF16, str(int(not instructions)))
    assert run_train(monkeypatch, f"resume={run}", "trainer.max_epochs=2") == 0
    assert f"on cpu, {expected}: as this run began" in capsys.readouterr().out
    assert json.loads((run / "summary.json").read_text())["machine"]["precision"] == expected

    other = "32-true" if instructions else "bf16-mixed"
    typed = ["trainer.max_epochs=3", f"trainer.precision={other}"]
    assert run_train(monkeypatch, f"resume={run}", *typed) == 0
    assert f"{other}: as configured; the run had {expected} until now" in capsys.readouterr().out

    capsys.readouterr()
    out = sample(run, tmp_path / "out", "n=2")
    assert manifest(out)["machine"]["processor"] == machine.processor()
    assert "drawing on cpu" in capsys.readouterr().out


def test_a_checkpoint_that_does_not_say_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    monkeypatch.setenv(machine.FORCE_BF16, "0")
    assert run_train(monkeypatch, *SHORT, f"hydra.run.dir={run}") == 0
    path = run / "checkpoints/last.ckpt"
    content = torch.load(path, weights_only=True)
    del content[KEY]["machine"]
    torch.save(content, path)
    assert run_train(monkeypatch, f"resume={run}", "trainer.max_epochs=2") == 0
    assert "IMAGEGEN_BF16=0; the checkpoint does not name its own" in capsys.readouterr().out
    content[KEY]["machine"] = {"precision": 7}
    torch.save(content, path)
    assert run_train(monkeypatch, f"resume={run}", "trainer.max_epochs=3") == 1
    assert "in which precision" in capsys.readouterr().err


def test_what_records_keep_is_plain() -> None:
    found = describe(CPU)
    assert json.loads(json.dumps(found)) == found


def test_the_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["machine"])
    command.main()
    lines = dict(
        line.split(maxsplit=1) if line[:16].strip().count(" ") == 0 else (line[:17].strip(), line)
        for line in capsys.readouterr().out.splitlines()
    )
    for name in ("processor", "instruction sets", "threads", "training", "drawing", "torch"):
        assert lines[name]
    monkeypatch.setattr(sys, "argv", ["machine", "x"])
    with pytest.raises(SystemExit, match=r"error: .* takes no options"):
        command.main()


def test_an_unknown_precision_is_refused_with_those_there_are() -> None:
    with pytest.raises(UserError, match=r"precision=foo is unknown; it can be auto, tf32"):
        training_precision({"precision": "foo"})


# Systems that are not Unix


def test_everything_imports_without_unix() -> None:
    """And a process can be killed, as Windows does it."""
    program = (
        # Python's own asyncio, which PyTorch imports, needs Unix where it is made for it.
        "import asyncio, os, pkgutil, signal, sys\n"
        "for name in ('SIGKILL', 'SIGUSR1', 'SIGUSR2'): delattr(signal, name)\n"
        "for name in ('sched_getaffinity', 'getloadavg', 'sysconf', 'getuid'): delattr(os, name)\n"
        "for name in ('fcntl', 'resource', 'pwd'): sys.modules[name] = None\n"
        "import imagegen, importlib.util\n"
        "extra = () if importlib.util.find_spec('gradio') else ('imagegen.commands.page.',)\n"
        "for module in pkgutil.walk_packages(imagegen.__path__, 'imagegen.'):\n"
        "    if not module.name.endswith('__main__') and not module.name.startswith(extra):\n"
        "        __import__(module.name)\n"
        "from imagegen.core import machine\n"
        "from imagegen.training import launcher\n"
        "import torch\n"
        "assert launcher._KILL == signal.SIGTERM\n"
        "assert machine.describe(torch.device('cpu'))['usable_cpus'] >= 1\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=PROJECT_ROOT
    )
    assert done.returncode == 0, done.stderr
