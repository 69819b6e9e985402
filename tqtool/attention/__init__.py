"""The attention document: plain attention, RoPE, and the two caches."""
