"""One position of an attention mechanism: update the state, read it, normalise, in one pass.

Axes: `r` row, `h` head, `d` query/key feature, `m` value feature.
"""

from __future__ import annotations

from typing import no_type_check

from numba import float32, njit

from imagegen.decode.elementwise import FAST, exp32

ELU, RELU = 0, 1
FEATURE_MAPS = {"elu": ELU, "relu": RELU}


@no_type_check
@njit(cache=True, nogil=True, fastmath=FAST, error_model="numpy")
def linear_attention(qkv, s, z, feature_map, eps, y):
    """S += phi(k) v^T, z += phi(k), y = phi(q)^T S / (phi(q)^T z + eps), for maps d -> d.

    Args:
        qkv: "r (q h d, k h d, v h m)", or wider; q and k are overwritten by their features.
        s: "r h d m", changed.
        z: "r h d", changed.
        feature_map: one of `FEATURE_MAPS`.
        eps: added to the normaliser.
        y: "r (h m)", written.
    """
    rows, heads, d, m = s.shape
    inner = heads * d
    for r in range(rows):
        row = qkv[r]
        if feature_map == ELU:
            for i in range(2 * inner):
                x = row[i]
                row[i] = max(x, float32(0.0)) + exp32(min(x, float32(0.0)))
        else:
            for i in range(2 * inner):
                row[i] = max(row[i], float32(0.0))
        for h in range(heads):
            q, k = row[h * d : (h + 1) * d], row[inner + h * d : inner + (h + 1) * d]
            v = row[2 * inner + h * m : 2 * inner + (h + 1) * m]
            out = y[r, h * m : (h + 1) * m]
            total = z[r, h]
            normalizer = float32(0.0)
            for i in range(d):
                total[i] += k[i]
                normalizer += q[i] * total[i]
            for j in range(m):
                out[j] = float32(0.0)
            for i in range(d):
                key, query, state = k[i], q[i], s[r, h, i]
                for j in range(m):
                    state[j] += key * v[j]
                    out[j] += query * state[j]
            factor = float32(1.0) / (normalizer + eps)
            for j in range(m):
                out[j] *= factor
