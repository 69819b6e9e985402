# ruff: noqa
# fmt: off
"""Decode a .tq.safetensors file (format 1.0) without tqtool: python decode_container.py FILE OUT.npz"""

import json, sys
import ml_dtypes  # noqa: F401  NumPy knows bfloat16 metadata once this is imported
import numpy as np
from safetensors import safe_open

prime = lambda q: q > 1 and all(q % i for i in range(2, q))
exists = lambda m: m > 8 and m % 4 == 0 and (prime(m - 1) or (m // 2 % 4 == 2 and prime(m // 2 - 1)))

def paley(m):
    q = m - 1 if prime(m - 1) else m // 2 - 1
    chi = np.array([0] + [1 if pow(a, q // 2, q) == 1 else -1 for a in range(1, q)])
    h = np.ones((q + 1, q + 1), int)
    h[1:, 1:] = chi[(np.arange(q) - np.arange(q)[:, None]) % q]
    if q == m - 1:
        h[1:, 0] = -1
        return h + np.diag([0] + [1] * q)
    h[0, 0] = 0
    return np.kron(h, [[1, 1], [1, -1]]) + np.kron(np.eye(q + 1, dtype=int), [[1, -1], [-1, -1]])

def decode(codes, scales, centroids, signs, d, bits):
    index = np.unpackbits(codes, axis=1, bitorder="little")[:, : d * bits].reshape(-1, d, bits) @ (1 << np.arange(bits))
    y = centroids[index.T]  # (d, vectors), float32 all the way
    m = next((d >> k for k in range(10, -1, -1) if d % 2**k == 0 and exists(d >> k)), 1) if d & (d - 1) else 1
    runs = y.reshape(m, -1)
    if m > 1:
        y = np.stack([sum((h * r for h, r in zip(row[1:], runs[1:])), row[0] * runs[0]) for row in paley(m).T.astype("f4")])
    for stride in (2**k for k in range((d // m).bit_length() - 1)):
        a, b = np.moveaxis(y.reshape(-1, 2, stride, len(codes)), 1, 0)
        y = np.stack([a + b, a - b], 1)
    x = (y.reshape(d, -1) * (scales.astype("f8") / np.sqrt(d))).astype("f4").T
    return np.where(np.unpackbits(signs, bitorder="little")[:d], -x, x)

with safe_open(sys.argv[1], "np") as file:
    out = {}
    for name, t in json.loads(file.metadata()["tq_manifest"])["tensors"].items():
        if t.get("copied"):
            out[name] = file.get_tensor(name)
            continue
        d = t["shape"].pop(t["axis"])
        codes, meta = file.get_tensor(f"{name}.codes"), file.get_tensor(f"{name}.meta").astype("f4")
        scales = (meta[..., 0] if t["meta"] == "range" else meta).reshape(-1)
        book, signs = file.get_tensor(f"tq.centroids.{t['law']}.{d}.{t['bits']}"), file.get_tensor(f"tq.signs.{d}")
        x = decode(codes.reshape(len(scales), -1), scales, book, signs, d, t["bits"])
        out[name] = np.moveaxis(x.reshape(*t["shape"], d), -1, t["axis"])
np.savez(sys.argv[2], **out)
