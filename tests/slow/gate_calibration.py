"""What the gate levels were set on: python tests/slow/gate_calibration.py [DUMPS]

Prints, for the real dumps, each gated metric of each configuration over four rotation seeds, beside the perplexity
figures that are known for SmolLM2 (all 30 layers, every token quantized), and a least-squares fit of the damage.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from tqtool.dumps.dump import load_dump
from tqtool.report.gates import LEVELS, limit_value
from tqtool.report.params import Params
from tqtool.validation.dump_data import from_dump
from tqtool.validation.run import validate

PERPLEXITY = {"K4/V4": 25.22, "K4/V3": 25.92, "K4/V2": 28.63, "K3/V3": 32.62, "K3/V2": 35.89, "K2/V2": 76.99}
EXACT = 23.66


def main() -> None:
    dumps = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[3] / "shared" / "dumps"
    gated = [limit.metric for limit in LEVELS["balanced"]]
    for name, most in (("smollm2-135m", None), ("qwen2-tiny-hd64", 256)):
        data = from_dump(load_dump(dumps / name / "kv"))
        report = validate([data], Params(("K8/V8", "K8/V4", *PERPLEXITY), seeds=(0, 1, 2, 3), max_queries=most))
        print(f"\n{name}: worst of 4 seeds\nconfig   level     ppl    " + "  ".join(f"{m:>13}" for m in gated))
        for row in report.rows[1:]:
            loss = PERPLEXITY.get(row.config, np.nan) / EXACT - 1 if name.startswith("smol") else np.nan
            cells = "  ".join(f"{limit_value(row, limit)[0]:13.4f}" for limit in LEVELS["balanced"])
            print(f"{row.config:8} {row.level:8} {loss:6.1%}  {cells}")
        if name.startswith("smol"):
            rows = {row.config: row for row in report.rows}
            x = [(rows[c].metrics["kl"].mean, rows[c].metrics["v_readout_err"].mean ** 2, 1) for c in PERPLEXITY]
            y = [np.log(p / EXACT) for p in PERPLEXITY.values()]
            fit, _residual, *_ = np.linalg.lstsq(np.array(x), np.array(y), rcond=None)
            print(f"ln(ppl/exact) = {fit[0]:.2f} kl + {fit[1]:.2f} v_readout_err^2 {fit[2]:+.3f}")
            print("fitted", dict(zip(PERPLEXITY, np.round(np.expm1(np.array(x) @ fit), 3).tolist(), strict=True)))


main()
