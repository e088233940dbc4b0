"""DFlash speculative decoding from one ahead-of-time engine: build, verify, serve."""

import os

__version__ = "0.1.0"

# ONNX Runtime reports its use to its maker unless this is set before it is imported. A server of
# other people's text does not; who wants it sets the variable to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
