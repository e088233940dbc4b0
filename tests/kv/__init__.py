"""The KV-injection kernel for tests: its C interface, launches, NumPy reference."""
