"""Peak memory of training linear attention: imagegen's beside pytorch-fast-transformers'.

    python benchmarks/peer_memory.py                 (in an environment with both, see CONTRIBUTING)
    python benchmarks/peer_memory.py --lengths 16384 --repeats 3

Both run with the paper's sizes: a width of 256, 8 heads of 32 features, one sequence, float32.
`layer` is one attention layer with its projections; `model` is two blocks of attention and a
feed-forward layer of 1,024. Each measurement has a process of its own. After a small forward and
backward pass, which loads the libraries, the kernel's record of the peak is reset; the figure is
the peak of resident memory during one forward and backward pass above what was resident before it,
where weights, input and the gradient that the backward pass starts from are. `saved` are the bytes
of the tensors that the forward pass keeps for the backward pass, each piece of memory counted once.
Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
D_MODEL, N_HEADS, D_FF = 256, 8, 1024
WHO = ("imagegen", "fast-transformers")
MIB = 2**20


def _build(who: str, what: str):  # type: ignore[no-untyped-def]
    """The module, and a function that calls it for "b n e" and returns its output "b n e"."""
    import torch

    if who == "imagegen":
        from imagegen.attention.linear import LinearAttention
        from imagegen.model.block import Block, BlockOptions

        if what == "layer":
            module = LinearAttention(D_MODEL, N_HEADS)
            return module, lambda x: module(x)[0]
        options = BlockOptions(D_MODEL, N_HEADS, D_FF, norm_first=False)
        module = torch.nn.ModuleList(
            Block(LinearAttention(D_MODEL, N_HEADS), options, row_length=1) for _ in range(2)
        )

        def blocks(x: torch.Tensor) -> torch.Tensor:
            for block in module:
                x, _ = block(x, None)
            return x

        return module, blocks

    from fast_transformers.attention import AttentionLayer, CausalLinearAttention
    from fast_transformers.masking import LengthMask, TriangularCausalMask
    from fast_transformers.transformers import TransformerEncoder, TransformerEncoderLayer

    def attention() -> torch.nn.Module:
        inner = CausalLinearAttention(D_MODEL // N_HEADS)
        return AttentionLayer(inner, D_MODEL, N_HEADS)

    def masks(length: int) -> tuple[object, object]:
        # Its triangular mask has length^2 entries, of which this mechanism reads none: a small one
        # is its best case.
        return TriangularCausalMask(1), LengthMask(torch.tensor([length]), max_len=length)

    if what == "layer":
        layer = attention()

        def one(x: torch.Tensor) -> torch.Tensor:
            causal, lengths = masks(x.shape[1])
            return layer(x, x, x, causal, lengths, lengths)

        return layer, one
    encoder = TransformerEncoder(
        [
            TransformerEncoderLayer(attention(), D_MODEL, D_FF, dropout=0.0, activation="gelu")
            for _ in range(2)
        ]
    )

    def model(x: torch.Tensor) -> torch.Tensor:
        causal, lengths = masks(x.shape[1])
        return encoder(x, attn_mask=causal, length_mask=lengths)

    return encoder, model


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure(who: str, what: str, length: int) -> dict[str, float]:
    """MiB in this process: the peak of one forward and backward pass, and what is saved between."""
    import torch

    torch.manual_seed(0)
    module, call = _build(who, what)
    _passes(call, torch.randn(1, 64, D_MODEL, requires_grad=True), torch.ones(1, 64, D_MODEL))
    module.zero_grad()
    x = torch.randn(1, length, D_MODEL, requires_grad=True)
    gradient = torch.ones(1, length, D_MODEL)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    _passes(call, x, gradient)
    peak = _resident("VmHWM") - before

    saved: dict[int, int] = {}
    given = {t.untyped_storage().data_ptr() for t in (x, *module.parameters())}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = call(x)
    del y
    return {"peak": peak / MIB, "saved": sum(saved.values()) / MIB}


def _passes(call: Callable, x: object, gradient: object) -> None:
    call(x).backward(gradient)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--what", nargs="+", choices=["layer", "model"], default=["layer", "model"])
    parser.add_argument("--repeats", type=int, default=5, help="processes for each figure")
    parser.add_argument("--one", nargs=3, metavar=("WHO", "WHAT", "LENGTH"), help="in this process")
    options = parser.parse_args()
    if options.one:
        who, what, length = options.one
        print(json.dumps(measure(who, what, int(length))))
        return
    print("| what | positions | whose | peak, MiB (least to most) | saved for backward, MiB |")
    print("|---|---|---|---|---|")
    for what in options.what:
        for length in options.lengths:
            results: dict[str, list[dict[str, float]]] = {who: [] for who in WHO}
            for _ in range(options.repeats):
                for who in WHO:
                    command = [sys.executable, __file__, "--one", who, what, str(length)]
                    done = subprocess.run(command, capture_output=True, text=True)
                    if done.returncode:
                        sys.exit(f"{who}, {what}, {length}: {done.stderr}")
                    results[who].append(json.loads(done.stdout.splitlines()[-1]))
            for who in WHO:
                peaks = [result["peak"] for result in results[who]]
                saved = statistics.median(result["saved"] for result in results[who])
                spread = f"{min(peaks):.0f} to {max(peaks):.0f}"
                print(
                    f"| {what} | {length:,} | {who} | **{statistics.median(peaks):.0f}** ({spread})"
                    f" | {saved:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
