"""The measured decoding step: bytes and agreement are facts, times only positive."""

import pytest

from tqtool.bench.cache import AttentionSpeed, attention_speed
from tqtool.codec.sizes import AttentionLayer, KVConfig, cache_size


@pytest.mark.parametrize("tokens", [1, 300, 2500])  # one block of drawn tokens, less, and more
def test_one_decoding_step_is_measured(tokens: int) -> None:
    config = KVConfig(4, 2)
    speed = attention_speed(tokens, config, heads=4, kv_heads=2, dim=64, seconds=0)
    sized = cache_size(config, [AttentionLayer(2, 64)], tokens=tokens)
    assert (speed.packed_bytes, speed.float32_bytes) == (sized.total, sized.float32)
    assert speed.agreement < 1e-5
    assert min(speed.float32_seconds, speed.fused_seconds, speed.write_seconds, speed.work_seconds) > 0
    assert speed.speedup == speed.float32_seconds / speed.fused_seconds
    assert speed.overhead == speed.work_seconds / speed.fused_seconds
    assert speed.call_overhead == speed.write_seconds / speed.fused_seconds
    float32, compressed = speed.tokens_per_second
    assert float32 == 1 / speed.float32_seconds
    assert 1 / compressed == pytest.approx(speed.fused_seconds + speed.work_seconds)


def test_operations_are_the_specifications_table() -> None:
    """d = 128, K4/V2, 2,048 tokens: 896 to rotate, 512 and 256 to quantize, 128 to pack, 524,288 to attend."""
    facts = dict.fromkeys(("float32_seconds", "fused_seconds", "write_seconds", "work_seconds", "agreement"), 1.0)
    speed = AttentionSpeed(KVConfig(4, 2), 128, 2048, **facts, float32_bytes=1, packed_bytes=1)
    assert list(speed.operations.values()) == [896, 896, 512, 256, 128, 128, 896, 524_288, 896]
    assert sum(list(speed.operations.values())[:6]) == 2816
    paley = AttentionSpeed(KVConfig(4, 2), 80, 1, **facts, float32_bytes=1, packed_bytes=1)
    assert paley.operations["rotate K"] == 80 * (2 + 20)  # runs of 4, a matrix of order 20
