"""DFlash speculative decoding from one ahead-of-time engine: build, verify, serve."""

__version__ = "0.1.0"
