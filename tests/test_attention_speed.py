"""The measured decoding step: bytes and agreement are facts, times only positive."""

import pytest

from tqtool.bench.cache import attention_speed
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
