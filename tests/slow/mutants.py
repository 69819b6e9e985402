"""Plants faults in the C runtime, one at a time, and asks the exported tests who notices.

    python tests/slow/mutants.py              all of them: some minutes
    python tests/slow/mutants.py --only ring  those whose name holds a word

Every fault is one that compiles: a constant, a comparison, a stride, a missing check, the order of a check and a write.
The exported suite must see each by itself, with no help from pytest. Exit status 1 if one goes unseen.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqtool.export.compiler import c_compiler
from tqtool.export.package import export_files

MAIN, KERNELS = "turboquant.c", "turboquant_kernels.h"
STORE_K = "tq_store((fa_tq_cache *)(uintptr_t)cache, (size_t)layer, (size_t)pos, (size_t)rows, k, true);"
DIMS, BITS = (20, 64), (2, 3, 4)  # a Paley order and a power of two
SECONDS = 300  # a fault that makes the tests run for ever is seen


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    file: str
    before: str
    after: str


FAULTS = (
    # constants
    Fault("the default is K4/V3", MAIN, "config.value_bits = 2;", "config.value_bits = 3;"),
    Fault("other signs", MAIN, "return z ^ (z >> 31);", "return z ^ (z >> 30);"),
    Fault(
        "norms up to 2^121", MAIN, "1329227995784915872903807060280344576.0", "2658455991569831745807614120560689152.0"
    ),
    Fault(
        "half subnormals are twice as large", MAIN, "(1.0f / 16777216.0f) : (float)", "(1.0f / 8388608.0f) : (float)"
    ),
    Fault("e^x from other terms", KERNELS, "1.0f / 24.0f", "1.0f / 23.0f"),
    Fault("ln 2 in one part", KERNELS, " - n * 1.42860677e-6f", " - n * 1.42860677e-5f"),
    # signs and values
    Fault("half subnormals lose their sign", MAIN, "return sign ? -(float)rest", "return sign ? (float)rest"),
    Fault("bf16 scales are cut off", MAIN, "(bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16", "bits >> 16"),
    Fault("bf16 ties go up", MAIN, "0x7fffu + ((bits >> 16) & 1u)", "0x8000u"),
    Fault("exact halves are cut off", MAIN, "+ 0xfffu + (rest >> 13 & 1u)) >> 13", ") >> 13"),
    Fault("the norm is the scale", MAIN, "[index + 1] = (float)norm", "[index + 1] = scale"),
    Fault("a wrong butterfly", KERNELS, "p[0] = b0 + b4;", "p[0] = b0 - b4;"),
    Fault("one rounding more", KERNELS, "(float)(norm / sqrt(energy))", "(float)norm / (float)sqrt(energy)"),
    Fault("lsq without its product", KERNELS, "norm * product / energy", "norm / energy * energy"),
    Fault("the inverse is not transposed", KERNELS, "transpose ? i * order + k + a", "false ? i * order + k + a"),
    # comparisons
    Fault(
        "a value on a boundary goes down",
        KERNELS,
        "node + (LANE(y, l) >= t->tree[node]",
        "node + (LANE(y, l) > t->tree[node]",
    ),
    Fault(
        "ties go down in the plain count",
        KERNELS,
        "AT_LEAST(y, FN(broadcast)(t->boundaries[k]))",
        "(AT_LEAST(y, FN(broadcast)(t->boundaries[k])) & ~AT_LEAST(FN(broadcast)(t->boundaries[k]), y))",
    ),
    Fault("the length counts values", MAIN, "if (is_key && slot + n > cache->lengths", "if (slot + n > cache->lengths"),
    Fault("a ring shortens the layer", MAIN, "is_key && slot + n > cache->lengths[layer])", "is_key)"),
    Fault(
        "one token too many is evicted",
        MAIN,
        "(size_t)n > tq_evictable(cache, (size_t)layer)",
        "(size_t)n > 1 + tq_evictable(cache, (size_t)layer)",
    ),
    Fault(
        "one slot too many", MAIN, "pos >= 0 && (size_t)pos < cache->slots", "pos >= 0 && (size_t)pos <= cache->slots"
    ),
    Fault(
        "one layer too many",
        MAIN,
        "layer >= 0 && (size_t)layer < cache->layers",
        "layer >= 0 && (size_t)layer <= cache->layers",
    ),
    Fault("causal rows see one more", MAIN, "a->rows - 1 - row : 0", "a->rows - 2 - row : 0"),
    Fault(
        "the last block is not cut",
        MAIN,
        "if (slot < walk->tokens) slots[n++]",
        "if (slot < walk->tokens + 1) slots[n++]",
    ),
    Fault("-1 is slot 0", MAIN, "*walk->entries < 0 ? walk->tokens", "*walk->entries < 0 ? 0"),
    Fault(
        "exact tokens by one fewer",
        MAIN,
        "if (!sink && i + cache->window < n) continue;",
        "if (!sink && i + cache->window <= n) continue;",
    ),
    Fault(
        "one sink fewer is spared",
        MAIN,
        "cache->lengths[layer] - cache->sinks : 0",
        "cache->lengths[layer] + 1 - cache->sinks : 0",
    ),
    Fault("65504 does not fit into a half", MAIN, "rest >= 0x477ff000u", "rest >= 0x477fe000u"),
    Fault("an entry of a block too many", MAIN, "(tokens + block - 1) / block", "tokens / block + 1"),
    # strides and places
    Fault(
        "k is stored as the value",
        MAIN,
        "(size_t)step->pos + row, attention.rows, step->v + row * vector",
        "(size_t)step->pos + row, attention.rows, step->k + row * vector",
    ),
    Fault("write stores k twice", MAIN, "(size_t)rows, v, false);", "(size_t)rows, k, false);"),
    Fault(
        "scales of the first token",
        MAIN,
        "+ token * packed->scale_token_stride * tq_meta_bytes",
        "+ 0 * token * packed->scale_token_stride * tq_meta_bytes",
    ),
    Fault(
        "heads share a scale",
        MAIN,
        "packed.scale_head_stride = tq_meta_elements(cache->config.meta);",
        "packed.scale_head_stride = 1;",
    ),
    Fault(
        "all heads read the first's entries",
        MAIN,
        "choice->entries + head * choice->head_stride : NULL",
        "choice->entries : NULL",
    ),
    Fault(
        "exact rows of the first head",
        KERNELS,
        "exact->row_stride + head * s->dim",
        "exact->row_stride + 0 * head * s->dim",
    ),
    Fault("exact rows keep their scale", KERNELS, "scales[at[l]] = 1.0f;", "(void)scales;"),
    Fault(
        "exact values are not turned",
        KERNELS,
        "const VF *y = FN(hadamard)(s, false, x, spare);\n        float *tile",
        "const VF *y = x;\n        float *tile",
    ),
    Fault(
        "evicted codes, kept scales",
        MAIN,
        "        tq_move_down(tq_scales_at(cache, side, layer, 0)",
        "        if (side == 2) tq_move_down(tq_scales_at(cache, side, layer, 0)",
    ),
    Fault(
        "an eviction moves the sinks",
        MAIN,
        "tq_move_down(tq_codes_at(cache, side, layer, 0), tq_code_bytes(cache, side), cache->sinks,",
        "tq_move_down(tq_codes_at(cache, side, layer, 0), tq_code_bytes(cache, side), (size_t)0,",
    ),
    Fault(
        "one layer's eviction is every layer's",
        MAIN,
        "    tq_evict(cache, (size_t)layer, (size_t)n);\n",
        "    for (size_t each = 0; each < cache->layers; each++) tq_evict(cache, each, (size_t)n);\n",
    ),
    Fault(
        "an eviction forgets the exact rows", MAIN, "tq_evict_exact(cache, side, layer, gone);", "(void)tq_evict_exact;"
    ),
    Fault(
        "decode ignores exact rows", MAIN, "exact && token < tokens; token++", "exact && token < 0 * tokens; token++"
    ),
    Fault(
        "clear leaves the lengths",
        MAIN,
        "memset(cache->lengths, 0, cache->layers * sizeof *cache->lengths);",
        "if (cache->written[0][0] == 0) memset(cache->lengths, 0, cache->layers * sizeof *cache->lengths);",
    ),
    Fault("clear leaves the codes", MAIN, "memset(cache->codes[side], 0, all", "memset(cache->codes[side], 0, 0 * all"),
    Fault("what sums lost is lost", KERNELS, "*query->sum *= shrink;", "*query->sum *= 1.0f;"),
    # attention
    Fault(
        "attends to pos + 1 slots",
        MAIN,
        "attention.tokens = cache->lengths[layer];",
        "attention.tokens = (size_t)step->pos + row + attention.rows;",
    ),
    Fault("a ring's rows as a block", MAIN, "length > end ? 1 : TQ_BLOCK_ROWS", "TQ_BLOCK_ROWS"),
    Fault(
        "the scale is applied twice", MAIN, "query.rotated[j] *= a->scale;", "query.rotated[j] *= a->scale * a->scale;"
    ),
    Fault(
        "every head is the first",
        MAIN,
        "(row * a->query_heads + a->first_head * a->group) * dim, dim);",
        "row * a->query_heads * dim, dim);",
    ),
    # missing checks, and writes before them
    Fault(
        "NaN in a later head is written first",
        MAIN,
        "    const int error = tq_check_vectors(cache, vec, 1);\n    if (!error) tq_store",
        "    const int error = tq_check_vectors(cache, vec, 1);\n    tq_store",
    ),
    Fault(
        "only the first head is checked",
        MAIN,
        "norms(cache->state, vectors, count * cache->heads)",
        "norms(cache->state, vectors, count)",
    ),
    Fault(
        "a step writes before checking k",
        MAIN,
        "    const int error = tq_check_vectors(cache, k, (size_t)rows);",
        "    " + STORE_K + "\n    const int error = tq_check_vectors(cache, k, (size_t)rows);",
    ),
    Fault(
        "v is not checked", MAIN, "return error ? error : tq_check_vectors(cache, v, (size_t)rows);", "return error;"
    ),
    Fault(
        "v is checked after k is written",
        MAIN,
        "    return error ? error : tq_check_vectors(cache, v, (size_t)rows);",
        "    if (!error) " + STORE_K + "\n    return error ? error : tq_check_vectors(cache, v, (size_t)rows);",
    ),
    Fault(
        "float16's range is not checked",
        MAIN,
        "return tq_exact_holds(cache, vectors, count) ? FA_TQ_OK : FA_TQ_ERR_EXACT;",
        "return FA_TQ_OK;",
    ),
    Fault(
        "chosen slots are not checked",
        MAIN,
        "if (!tq_fits(&step->choice, cache->heads, length)) return FA_TQ_ERR_POSITION;",
        "if (length == 0) return FA_TQ_ERR_POSITION;",
    ),
    Fault("a centroid of 0 is taken", MAIN, " || c == 0.0f ||", " ||"),
    Fault(
        "tables need not ascend",
        MAIN,
        "(k > 0 && !(table->centroids[k - 1] < c))",
        "(k > 0 && table->centroids[k - 1] > 1e9f)",
    ),
    Fault(
        "the refused vector is of the token",
        MAIN,
        "if (error && bad) *bad += token * heads;",
        "if (error && bad) *bad += token;",
    ),
    Fault("an unknown metadata form is taken", MAIN, "packed->meta < FA_TQ_METAS", "packed->meta <= FA_TQ_METAS"),
)


def seen_by(fault: Fault, files: dict[str, str]) -> tuple[str, ...] | None:
    """Return the exported tests that fail under the fault, () for none; None where it cannot be planted."""
    if files[fault.file].count(fault.before) != 1:
        return None
    planted = files | {fault.file: files[fault.file].replace(fault.before, fault.after)}
    with tempfile.TemporaryDirectory(prefix="tqtool-mutant-") as folder:
        for name, text in planted.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        build = [*c_compiler(), "-std=c99", "-O1", "-w", "-o", "tests", "test_turboquant.c", "turboquant.c", "-lm"]
        subprocess.run(build, cwd=folder, check=True)
        try:
            done = subprocess.run(
                ["./tests"], cwd=folder, capture_output=True, text=True, errors="replace", check=False, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            return ("(runs for ever)",)
    failed = re.findall(r"^not ok +\d+ - (.*)$", done.stdout, re.MULTILINE)
    return tuple(failed) or (() if done.returncode == 0 else ("(crash)",))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="", help="a word of the faults' names")
    chosen = [fault for fault in FAULTS if parser.parse_args().only in fault.name]
    files = export_files(DIMS, BITS)
    unseen = 0
    with ThreadPoolExecutor(2) as pool:
        for fault, seen in zip(chosen, pool.map(partial(seen_by, files=files), chosen), strict=True):
            unseen += not seen
            text = "CANNOT BE PLANTED" if seen is None else ", ".join(seen) or "UNSEEN"
            print(f"{fault.name:<40} {text}", flush=True)
    print(f"{len(chosen)} faults, {unseen} unseen")
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main())
