"""A Triton model around dflash_trt.serve, which does the work. One instance owns one engine."""

import triton_python_backend_utils as pb_utils

from dflash_trt.serve.triton import load_model


class TritonPythonModel:
    """What Triton's Python backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine and try it out: the model is ready only if that works."""
        self.model = load_model(pb_utils, args)

    def execute(self, requests: list) -> None:
        """Take requests in; responses follow by their senders, so nothing is returned."""
        self.model.execute(requests)

    def is_ready(self) -> bool:
        """Answer Triton's question whether this process still serves (from 26.04 on)."""
        return self.model.is_ready

    def finalize(self) -> None:
        """Let running requests end."""
        self.model.close()
