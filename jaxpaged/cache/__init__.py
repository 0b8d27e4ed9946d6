"""The KV cache: who owns which block (plain Python) and the pool itself (JAX)."""
