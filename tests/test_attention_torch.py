"""Attention and rotary embedding against PyTorch and Hugging Face, where they are installed."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from loops import case
from numpy.typing import NDArray

from tqtool.attention.plain import AttentionConfig, attention, attention_mask, seen_mask
from tqtool.attention.rope import Pairing, rope

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, not ours

torch: Any = pytest.importorskip("torch", reason="torch is not installed: pip install torch")

AGREEMENT = 2e-6  # both sum in float32, in different orders


def draw(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def torch_attention(q: Any, k: Any, v: Any, **options: Any) -> NDArray[Any]:
    """PyTorch's function on (batch, seq, heads, dim) arrays."""
    heads_first = (torch.from_numpy(np.ascontiguousarray(x.transpose(0, 2, 1, 3))) for x in (q, k, v))
    grouped = q.shape[2] != k.shape[2]
    out = torch.nn.functional.scaled_dot_product_attention(*heads_first, enable_gqa=grouped, **options)
    return np.asarray(out.numpy().transpose(0, 2, 1, 3))


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_attention_is_pytorchs(kv_heads: int, causal: bool, dtype: Any) -> None:
    q, k, v = (
        x.astype(dtype) for x in (draw(1, 2, 33, 8, 64), draw(2, 2, 33, kv_heads, 64), draw(3, 2, 33, kv_heads, 64))
    )
    expected = torch_attention(q, k, v, is_causal=causal)
    got = attention(q, k, v, AttentionConfig(8, 64, kv_heads, causal=causal))
    assert np.abs(got - expected).max() < (AGREEMENT if dtype == np.float32 else 1e-14)


def test_masks_and_scale_are_pytorchs() -> None:
    q, k, v = draw(1, 2, 9, 4, 32), draw(2, 2, 21, 4, 32), draw(3, 2, 21, 4, 32)
    mask = draw(4, 2, 1, 9, 21)
    mask[draw(5, 2, 1, 9, 21) > 0.5] = -np.inf
    expected = torch_attention(q, k, v, attn_mask=torch.from_numpy(mask), scale=0.3)
    got = attention_mask(q, k, v, mask, AttentionConfig(4, 32, scale=0.3))
    assert np.abs(got - expected).max() < AGREEMENT


def test_huge_scores_are_pytorchs() -> None:
    q, k, v = draw(1, 1, 5, 2, 16) * 1e3, draw(2, 1, 40, 2, 16) * 10, draw(3, 1, 40, 2, 16)
    got = attention(*(x.astype(np.float64) for x in (q, k, v)), AttentionConfig(2, 16, causal=True))
    expected = torch_attention(
        *(x.astype(np.float64) for x in (q, k, v)), attn_mask=torch.from_numpy(seen_mask(5, 40, causal=True))
    )
    assert np.abs(got - expected).max() < 1e-12


@pytest.mark.parametrize(("pairing", "model"), [("half", "llama"), ("interleaved", "cohere")])
@pytest.mark.parametrize("start_pos", [0, 1234])
def test_rope_is_hugging_faces(pairing: Pairing, model: str, start_pos: int) -> None:
    modeling: Any = pytest.importorskip(f"transformers.models.{model}.modeling_{model}", reason="no transformers")
    configuration: Any = pytest.importorskip(f"transformers.models.{model}", reason="no transformers")
    name = model.capitalize()
    config = getattr(configuration, f"{name}Config")(
        hidden_size=256, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096
    )
    q, k = draw(1, 1, 10, 4, 64), draw(2, 1, 10, 2, 64)
    positions = torch.arange(start_pos, start_pos + 10)[None]
    heads_first = [torch.from_numpy(np.ascontiguousarray(x.transpose(0, 2, 1, 3))) for x in (q, k)]
    cos, sin = getattr(modeling, f"{name}RotaryEmbedding")(config)(heads_first[0], positions)
    expected = modeling.apply_rotary_pos_emb(*heads_first, cos, sin)
    theta = config.rope_parameters["rope_theta"]
    turned = rope(q, k, start_pos, pairing=pairing, theta=theta)
    for side, got, theirs in zip("qk", turned, expected, strict=True):
        # Their angles are float32 products: off by up to half a unit in the last place of the position.
        with case(side=side):
            assert np.abs(got - theirs.numpy().transpose(0, 2, 1, 3)).max() < 5e-7 * (start_pos + 10)


def test_window_and_softcap_are_hugging_faces() -> None:
    gemma: Any = pytest.importorskip("transformers.models.gemma2.modeling_gemma2", reason="no transformers")
    masking: Any = pytest.importorskip("transformers.masking_utils", reason="no transformers")
    q, k, v = draw(1, 1, 12, 4, 32), draw(2, 1, 12, 2, 32), draw(3, 1, 12, 2, 32)
    rule = masking.sliding_window_causal_mask_function(5)
    seen = np.array([[bool(rule(0, 0, torch.tensor(i), torch.tensor(j))) for j in range(12)] for i in range(12)])
    np.testing.assert_array_equal(seen_mask(12, 12, causal=True, window=5), seen)
    heads_first = (torch.from_numpy(np.ascontiguousarray(x.transpose(0, 2, 1, 3))) for x in (q, k, v))
    module = SimpleNamespace(num_key_value_groups=2, head_dim=32, training=False)
    mask = torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf))[None, None])
    expected, _ = gemma.eager_attention_forward(module, *heads_first, mask, scaling=0.4, softcap=2.0)
    got = attention(q, k, v, AttentionConfig(4, 32, 2, causal=True, window=5, softcap=2.0, scale=0.4))
    assert np.abs(got - expected.numpy()).max() < AGREEMENT
