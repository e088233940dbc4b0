"""The KV-injection kernel's C interface and its NumPy reference: for tests/plugins and tests/gpu."""
