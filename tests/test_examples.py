"""The examples run from the command line, and their adapters agree with float32."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loops import case
from numpy.typing import NDArray

from tqtool.attention.cache import KVCache, TurboQuantCache
from tqtool.attention.plain import AttentionConfig, attention
from tqtool.codec.sizes import KVConfig

EXAMPLES = Path(__file__).parent.parent / "examples"
EXACT = 5e-6  # float32 sums of hundreds of terms
SAMPLE = str(Path(__file__).parent.parent / "tqtool" / "data" / "sample")
SIZES = {"layers": 1, "kv_heads": 2, "head_dim": 32}
CONFIG = AttentionConfig(6, 32, 2, causal=True)


def draw(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def figure(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, text
    return float(found[1].replace(",", ""))


def test_generation_shows_how_far_the_caches_drift_apart() -> None:
    text = run("generation.py")
    assert figure(r"output cosine ([\d.]+)", text) > 0.9
    assert figure(r"K4/V2 cache [\d,]+: ([\d.]+)x", text) == 8.0  # head_dim 64
    assert 0 < figure(r"mean KL of the logits (\S+) nats", text) < 0.5
    finer = run("generation.py", SAMPLE, "K8/V8")
    assert figure(r"mean KL of the logits (\S+) nats", finer) < 1e-3
    assert figure(r"tokens: (\d+) chosen alike", finer) >= 31


@pytest.mark.parametrize(("name", "known"), [("K4/V2", 0.962), ("K2/V2", 0.879)])
def test_stepping_through_a_real_dump_gives_its_known_cosines(shared: Path, name: str, known: float) -> None:
    text = run("generation.py", str(shared / "dumps" / "smollm2-135m" / "kv"), name)
    assert figure(r"output cosine ([\d.]+)", text) == pytest.approx(known, abs=0.004)


def test_the_llama_ring_is_a_drop_in() -> None:
    text = run("llama_ring.py")
    assert figure(r"engine's loop: largest difference (\S+)", text) < 1e-5
    assert figure(r"in the engine's loop: (\S+)\n", text) < 1e-5
    assert figure(r"output cosine ([\d.]+)", text) > 0.9


def test_chosen_blocks_are_read_from_the_compressed_cache() -> None:
    text = run("block_sparse.py")
    assert figure(r"the same blocks: output cosine ([\d.]+)", text) > 0.9
    assert figure(r"(\d+) evicted", text) == 512
    assert figure(r"read (\d+) of", text) < 160
    assert figure(r"output cosine ([\d.]+)", run("block_sparse.py", SAMPLE, "K8/V8")) > 0.999


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.usefixtures("examples")
def test_the_llama_adapter_is_the_engines_arrays_at_every_step() -> None:
    from llama_ring import LlamaCache, engine_attention

    k, v, q = draw(1, 2, 30, 32), draw(2, 2, 30, 32), draw(3, 6, 30, 32)
    exact = LlamaCache(KVCache(**SIZES, max_seq_len=8), 8, CONFIG)
    packed = LlamaCache(TurboQuantCache(KVConfig(8, 8), **SIZES, max_seq_len=8), 8, CONFIG)
    for pos in range(30):
        with case(pos=pos):
            for cache in (exact, packed):
                cache.store(0, pos, k[:, pos], v[:, pos])
            window = np.s_[:, max(0, pos - 7) : pos + 1]  # the order does not matter to softmax
            expected = engine_attention(q[:, pos], k[window], v[window], CONFIG.score_scale)
            np.testing.assert_allclose(exact.attend(0, pos, q[:, pos]), expected, atol=EXACT)
            np.testing.assert_allclose(packed.attend(0, pos, q[:, pos]), expected, atol=0.05)


@pytest.mark.usefixtures("examples")
def test_block_choice_is_attention_over_these_blocks() -> None:
    import block_sparse as module

    k, v, q = draw(4, 2, 400, 32), draw(5, 2, 400, 32), draw(6, 6, 400, 32)
    exact = module.BlockSparse(KVCache(**SIZES, max_seq_len=256), 256)
    packed = module.BlockSparse(TurboQuantCache(KVConfig(8, 8), **SIZES, max_seq_len=256), 256)
    offset = 0  # tokens evicted so far
    for pos in range(400):
        with case(pos=pos):
            before = exact.cache.seq_len
            for sparse in (exact, packed):
                sparse.append(k[:, pos], v[:, pos])
            offset += before + 1 - exact.cache.seq_len
            slots = exact.choose(q[:, pos])
            columns = np.broadcast_to(slots[:, None] if slots.ndim == 1 else slots, (len(slots), 2))
            assert columns[-1, 0] == pos - offset
            outs = [sparse.attend(q[:, pos], CONFIG, slots) for sparse in (exact, packed)]
            for head in range(2):
                with case(head=head):
                    chosen: list[Any] = [x[head, columns[:, head] + offset][None, :, None] for x in (k, v)]
                    part = np.s_[head * 3 : head * 3 + 3]
                    alone = attention(q[part, pos][None, None], *chosen, AttentionConfig(3, 32, 1))[0, 0]
                    np.testing.assert_allclose(outs[0][part], alone, atol=EXACT)
                    np.testing.assert_allclose(outs[1][part], alone, atol=0.05)
    assert offset == 160
    assert len(exact.sums) == 8


def test_the_program_in_the_documentation_runs() -> None:
    text = (EXAMPLES.parent / "docs" / "cache.md").read_text()
    program = text.split("```python\n")[1].split("```")[0]
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["3", str(24 * 4096 * 8 * 112)]
