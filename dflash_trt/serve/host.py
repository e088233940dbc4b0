"""The engine of a serving process: loaded once, tried out, then run by one loop for all clients."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from dflash_trt import __version__
from dflash_trt.decode.admission import RunConfig
from dflash_trt.decode.engine import Engine
from dflash_trt.decode.handle import Handle
from dflash_trt.decode.loop import LoopState
from dflash_trt.decode.request import SamplingParams
from dflash_trt.decode.width import WidthPolicy
from dflash_trt.engine_dir import open_engine
from dflash_trt.errors import StepError
from dflash_trt.serve.metrics import ServeTelemetry
from dflash_trt.serve.options import ServeOptions
from dflash_trt.serve.request import GenerateRequest

_LOG = logging.getLogger(__name__)
SELF_TEST_TOKENS = 8
SELF_TEST_PROMPT = 16


class EngineHost:
    """Owns the engine and its loop. `submit` may be called from any thread."""

    def __init__(self, options: ServeOptions) -> None:
        """Load the engine, try it out, and start to serve.

        Raises `EngineDirError` or `ConfigError`; `StepError` when the engine fails its self-test.
        """
        self.options = options
        self.created = int(time.time())
        opened = open_engine(Path(options.engine))
        self.name = options.model_name or Path(options.engine).resolve().name
        self._engine = Engine.from_dir(opened, options.threads or None)
        self.tokenizer = self._engine.tokenizer
        self.limits = limits = self._engine.session.limits
        _self_test(self._engine)
        self.telemetry = ServeTelemetry(
            limits.block,
            {"slots": limits.max_slots, "queue_limit": options.queue},
            {
                "model": self.name,
                "backend": opened.config.backend,
                "precision": opened.config.choices.precision,
                "block": str(limits.block),
                "max_seq_len": str(limits.max_seq_len),
                "version": __version__,
            },
        )
        config = RunConfig(
            max_waiting=options.queue,
            max_prompt_tokens=options.max_prompt_tokens or None,
            max_output_tokens=options.max_output_tokens or None,
            max_step_s=options.step_seconds,
        )
        self.loop = self._engine.start(self._width(), config=config, telemetry=self.telemetry)
        self.telemetry.watch(lambda: self.loop.is_healthy, lambda: self.is_draining)
        _LOG.info("%s is ready: %d slots, block %d", self.name, limits.max_slots, limits.block)

    def _width(self) -> int | WidthPolicy:
        is_auto = self.options.width == "auto"
        return self._engine.auto_width() if is_auto else int(self.options.width)

    @property
    def is_ready(self) -> bool:
        """Whether new requests are taken."""
        return self.loop.is_healthy and self.loop.state is LoopState.RUNNING

    def submit(self, request: GenerateRequest) -> Handle:
        """Queue a request. Raises what `EngineLoop.submit` raises, and for a bad prompt."""
        self.loop.check_open()  # before the work of encoding
        ids = request.prompt_ids(self.tokenizer, self.limits.max_seq_len)
        seconds = [s for s in (request.deadline_s, self.options.request_seconds) if s]
        params = request.all_params(self.tokenizer)
        return self.loop.submit(ids, params, min(seconds, default=None))

    async def submit_async(self, request: GenerateRequest) -> Handle:
        """`submit`, while the event loop goes on: encoding a long prompt takes a while."""
        return await asyncio.to_thread(self.submit, request)

    @property
    def is_draining(self) -> bool:
        """Whether it was told to end: what runs may go on, or was cut off."""
        return self.loop.state in (LoopState.DRAINING, LoopState.CLOSED)

    @property
    def is_closed(self) -> bool:
        """Whether it was told to end at once."""
        return self.loop.state is LoopState.CLOSED

    def drain(self, timeout: float) -> bool:
        """Take no new requests, let the others end; whether they did."""
        return self.loop.drain(timeout)

    def close(self, timeout: float = 10.0) -> bool:
        """Cut off what runs, and end; False when a step hangs, whose thread lives on."""
        return self.loop.close(timeout)


def _self_test(engine: Engine) -> None:
    """One short text with the drafter. Raises `StepError` unless tokens come out of it."""
    started = time.perf_counter()
    prompt = [token % engine.session.limits.vocab_size for token in range(1, SELF_TEST_PROMPT + 1)]
    room = engine.session.limits.max_seq_len
    params = SamplingParams(max_tokens=min(SELF_TEST_TOKENS, room - 1), ignore_eos=True)
    made = engine.generate(prompt[: max(1, room - SELF_TEST_TOKENS)], params)
    if len(made.token_ids) != params.max_tokens:
        raise StepError(f"the self-test made {len(made.token_ids)} tokens of {params.max_tokens}")
    _LOG.info("the self-test took %.2f s", time.perf_counter() - started)
