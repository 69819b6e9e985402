"""Write the golden container of this release's format: a file that every later release must decode to the same bytes.

python tests/slow/write_golden.py        run once a format version, never by a test; refuses to replace what is there
"""

import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tqtool.codec.sizes import KVConfig
from tqtool.container.compression import compress_arrays
from tqtool.container.decompression import restore, select
from tqtool.container.format import open_container
from tqtool.container.selection import Request, choose
from tqtool.dumps.datafiles import open_file
from tqtool.files import output_file

FOLDER = Path(__file__).parents[1] / "data" / "golden"


def arrays() -> dict[str, np.ndarray]:
    """Draw keys and values of two layers (128 and 80 long), a zero vector, queries and integers, all small."""
    rng = np.random.default_rng(20)
    key = rng.standard_normal((2, 5, 128)).astype(np.float16)
    key[1, 3] = 0
    return {
        "layers.0.key": key,
        "layers.0.value": rng.standard_normal((2, 5, 128)).astype(ml_dtypes.bfloat16),
        "layers.1.key": (1000 * rng.standard_normal((2, 5, 80))).astype(np.float32),
        "layers.1.value": rng.standard_normal((2, 5, 80)).astype(np.float32),
        "layers.1.query": rng.standard_normal((6, 5, 80)).astype(np.float16),
        "positions": np.arange(5),
    }


FORMS = {
    "range": Request(config=KVConfig(4, 2)),
    "f32": Request(config=KVConfig(3, 8), meta="f32", seed=42, key_scale_rule="lsq", value_scale_rule="unbiased"),
    "bf16": Request(config=KVConfig(1, 5), meta="bf16", law="sphere", key_scale_rule="norm"),
}

if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "cache.safetensors"
        save_file(arrays(), source)
        for form, request in FORMS.items():
            target = FOLDER / f"format-1.0-{form}.tq.safetensors"
            file = open_file(source)
            compress_arrays(file, choose(file, request), target)
            container = open_container(target)
            with output_file(FOLDER / f"format-1.0-{form}.restored.npz") as out:
                restore(container, select(container, (), "f32"), "npz", out)
            print(target.name, target.stat().st_size, file=sys.stderr)
