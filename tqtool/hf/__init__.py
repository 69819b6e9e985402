"""Models of transformers: loaded, listened to, run with compressed caches. Only this room imports torch."""
