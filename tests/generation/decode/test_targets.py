"""The loops on processors of other kinds: compiled for each, and drawn with where this one can."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import numpy as np
import pytest

from imagegen.checkpoint.reading import load_checkpoint
from imagegen.core.machine import instruction_sets
from imagegen.generation import decode
from imagegen.generation.sampling_loop import generate
from tests.forks import SAMPLE, Forks
from tests.helpers import manifest, read_images, save_tiny_checkpoint

LINEAR, SOFTMAX, DECAYED = (
    "linear.LinearAttention",
    "softmax.SoftmaxAttention",
    "gated_delta.GatedDeltaNet",
)
ARM, X86 = "aarch64-unknown-linux-gnu", "x86_64-unknown-linux-gnu"
AVX2 = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2"
AVX512 = f"{AVX2},+avx512f,+avx512vl,+avx512bw,+avx512dq,+avx512cd,+avx512vnni"
ON_HASWELL = ("FMA AVX2", r"vfmadd vpmaddwd.*ymm", "fmaf|zmm|vpdpwssd")
ON_ICE_LAKE = ("FMA AVX2 AVX-512", "vfmadd.*zmm vpdpwssd.*zmm", "fmaf")
on_x86 = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="runs x86 instructions"
)


COMPILE = "from tests.generation.decode.compile_for import main; main()"


def _run(forks: Forks, program: str, arguments: list[str], processor: str, features: str) -> str:
    # Numba reads them when it is imported, which the parent of the forks has not done.
    target = {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": features}
    done = forks.run(program, *arguments, env=target)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    ("triple", "processor", "features", "kinds", "sets", "instructions", "not_these"),
    [
        (ARM, "generic", "+neon", [LINEAR], "NEON", "fmla smull|smlal", "fmaf"),
        pytest.param(
            *(ARM, "apple-m1", "+neon", [LINEAR, SOFTMAX, DECAYED]),
            *("NEON", "fmla smull|smlal", "fmaf"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(X86, "x86-64", "", [LINEAR, SOFTMAX, DECAYED]),
            *("", "mulps addps", "fmaf|vfmadd|ymm"),
            marks=pytest.mark.slow,
        ),
        # The products alone, which are all that differs between processors with FMA.
        (X86, "haswell", AVX2, [], *ON_HASWELL),
        (X86, "icelake-server", AVX512, [], *ON_ICE_LAKE),
        pytest.param(
            *(X86, "haswell", AVX2, [LINEAR, SOFTMAX, DECAYED], *ON_HASWELL), marks=pytest.mark.slow
        ),
        pytest.param(
            *(X86, "icelake-server", AVX512, [LINEAR, SOFTMAX, DECAYED], *ON_ICE_LAKE),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["AArch64", "Apple", "x86-64", "AVX2", "AVX-512", "AVX2, loops", "AVX-512, loops"],
)
def test_compiled_for_another_processor(
    triple: str,
    processor: str,
    features: str,
    kinds: list[str],
    sets: str,
    instructions: str,
    not_these: str,
    forks: Forks,
) -> None:
    """LLVM ends the process where it is given an instruction that the processor lacks."""
    target, code = _run(forks, COMPILE, [triple, *kinds], processor, features).split("\n", 1)
    assert target == " ".join([triple, processor, *sets.split()])
    for instruction in instructions.split():
        assert re.search(instruction, code)
    assert not re.search(not_these, code)


PRODUCTS = """
import sys
import numpy as np
from tests.generation.decode import test_matmul, test_matrix

rng = np.random.default_rng(0)
weight, bias = rng.standard_normal((33, 64)).astype(np.float32), np.ones(33, np.float32)
found = []
for rows in (1, 2, 7, 17):
    x = rng.standard_normal((rows, 64)).astype(np.float32)
    found.append(test_matmul._apply(x, weight, bias)[:, :33])
    found += [test_matrix._apply(x, weight, bias, bits) for bits in (16, 8)]
np.savez(sys.argv[1], *found)
"""


@on_x86
@pytest.mark.skipif("avx2" not in instruction_sets(), reason="runs AVX2's instructions")
def test_products_do_not_depend_on_the_vectors(tmp_path: Path, forks: Forks) -> None:
    """Of 256 bits, as without AVX-512, or those of this processor."""
    paths = [str(tmp_path / "haswell.npz"), str(tmp_path / "here.npz")]
    _run(forks, PRODUCTS, paths[:1], "haswell", AVX2)
    done = forks.run(PRODUCTS, paths[1])
    assert done.returncode == 0, done.stderr[-2000:]
    narrow, own = map(np.load, paths)
    assert len(narrow.files) == 12
    for name in narrow.files:
        assert np.array_equal(narrow[name], own[name])


@on_x86
def test_drawn_without_avx2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: Forks) -> None:
    ckpt, out = tmp_path / "model.ckpt", tmp_path / "out"
    dataset = {
        "_target_": "imagegen.data.image_folder.ImageFolder",
        "root": str(tmp_path),
        "size": 28,
        "channels": 1,
    }
    save_tiny_checkpoint(ckpt, dataset)
    typed = [f"ckpt={ckpt}", f"out={out}", "n=6", "seed=5", "device=cpu"]
    _run(forks, SAMPLE, typed, "nehalem", "")
    assert manifest(out)["loop"] == "compiled, 32"
    drawn = np.stack(list(read_images(out).values()))
    monkeypatch.setattr(decode, "SHORTEST", 1 << 30)
    expected = next(generate(load_checkpoint(ckpt).model, 6, seed=5))
    # A number may be rounded to the neighbouring level, and the rest of an image then differs.
    assert (drawn == expected).reshape(6, -1).all(axis=1).sum() >= 4


DISTRIBUTIONS = """
import sys
import numpy as np
import torch
from imagegen.generation.decode import BITS, parameters_as_drawn
from imagegen.generation.decode.integer import is_supported
from imagegen.core.spec import ImageSpec
from tests.forks import SAMPLE, Forks
from tests.helpers import tiny_model

assert not is_supported()
sequence = torch.from_numpy(np.random.default_rng(0).integers(0, 17, (7, 30, 1)).astype(np.uint8))
for kind in sys.argv[1:]:
    attention = {"_target_": f"imagegen.attention.{kind}"}
    model = tiny_model(ImageSpec(6, 5, 1, 17), attention=attention)
    with torch.no_grad():
        drawn = {p: parameters_as_drawn(model, sequence, None, p).numpy() for p in [*BITS, "auto"]}
        expected = model.double().parameters_of(sequence, None).numpy()
    assert np.array_equal(drawn["auto"], drawn["32"])
    for precision, limit in (("32", 2e-6), ("int16", 2e-3), ("int8", 3e-2)):
        error = np.sqrt(((drawn[precision] - expected) ** 2).mean() / expected.var())
        assert limit / 1e4 < error < limit, (kind, precision, error)
"""


@on_x86
@pytest.mark.slow
@pytest.mark.parametrize("processor", ["nehalem", "x86-64"])
def test_distributions_without_avx2(processor: str, forks: Forks) -> None:
    """All kinds and precisions: float32 without fused products, whole numbers without AVX2."""
    _run(forks, DISTRIBUTIONS, [LINEAR, SOFTMAX, DECAYED], processor, "")
