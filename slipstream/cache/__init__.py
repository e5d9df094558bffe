"""KV caches: allocation of blocks (pure Python), and their storage."""
