"""Engines on a real GPU against the CPU session, and what only a GPU can show.

The GPU computes in 16 bits: a token may differ from the CPU's only where the CPU's own logits of
the two are nearly equal. What one engine says of itself is compared exactly.
"""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.cache_files import CacheKey
from dflash_trt.decode.engine import Engine
from dflash_trt.decode.request import SamplingParams
from dflash_trt.engine_dir import ENGINE, EngineDir
from dflash_trt.flavor import TENSORRT_RTX, load_flavor
from dflash_trt.runtime.cuda import CudaDevice
from dflash_trt.runtime.open import open_session
from dflash_trt.runtime.session import StepRows
from dflash_trt.runtime.trt import TrtSession
from tiny import TinyEngine

pytestmark = pytest.mark.gpu

# The tiny pair's logits span about 10; BF16 keeps 8 bits of every activation on the way to them.
CLOSE = 0.35
GREEDY = SamplingParams(max_tokens=24)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, top_k=20, seed=3)
ADJUSTED = SamplingParams(max_tokens=24, repetition_penalty=1.3, logit_bias={5: 1.5})


def session_of(directory: EngineDir, max_graphs: int = 16) -> TrtSession:
    session = open_session(directory, max_graphs=max_graphs)
    assert isinstance(session, TrtSession)
    return session


def rows(tokens: list[int], length: int = 0) -> StepRows:
    one = np.ones(1, np.int32)
    size = one * len(tokens)
    return StepRows.greedy(np.array([tokens], np.int32), one * length, size, size)


def test_logits_are_close_to_the_cpus(
    gpu_engine: EngineDir, trained_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    gpu, cpu = session_of(gpu_engine), trained_engine.session()
    for index, prompt in enumerate(prompts[24:32]):
        start = 0
        for start in range(0, len(prompt), 8):
            mine, theirs = (
                s.step(index % 3, rows(prompt[start : start + 8], start), 0, want_logits=True)
                for s in (gpu, cpu)
            )
            assert mine.logits is not None
            assert theirs.logits is not None
            assert np.abs(mine.logits - theirs.logits).max() < CLOSE
        gpu.release(index % 3)
        cpu.release(index % 3)


@pytest.mark.parametrize("width", [1, 2, 4, 6])
def test_tokens_are_the_cpus_but_for_near_ties(
    width: int, gpu_engine: EngineDir, trained_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    gpu, cpu = session_of(gpu_engine), trained_engine.session()
    for prompt in [*prompts[:4], *prompts[26:30]]:
        made = trained_engine.engine(gpu).generate(prompt, GREEDY, width=width).token_ids
        text = [*prompt, *made]
        for at in range(len(prompt), len(text)):
            logits = _logits_after(cpu, text[:at])
            assert logits[text[at]] > logits.max() - CLOSE
            cpu.release(0)


def _logits_after(session: object, tokens: list[int]) -> np.ndarray:
    last = None
    for start in range(0, len(tokens), 8):
        part = tokens[start : start + 8]
        last = session.step(0, rows(part, start), 0, want_logits=True).logits  # type: ignore[attr-defined]
    return last[0, 0]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, ADJUSTED])
def test_graphs_change_no_token(
    params: SamplingParams, gpu_engine: EngineDir, trained_engine: TinyEngine,
    prompts: list[list[int]],
) -> None:  # fmt: skip
    jobs = [(prompt, params) for prompt in prompts[:6]]
    made = []
    for max_graphs in (0, 2, 16):
        session = session_of(gpu_engine, max_graphs)
        # Twice: the second time, more steps are launches of what the first one captured.
        engine: Engine = trained_engine.engine(session)
        made += [[g.token_ids for g in engine.generate_all(jobs)] for _ in range(2)]
        assert (session.num_graphs > 0) == (max_graphs > 0)
    assert all(tokens == made[0] for tokens in made[1:])


def test_a_slot_does_not_see_the_request_before_it(gpu_engine: EngineDir, cuda: CudaDevice) -> None:
    session = session_of(gpu_engine)
    wanted = session.step(1, rows([5, 6, 7]), 5, want_logits=True)
    for place, memory in zip(session._shapes.caches, session._caches, strict=True):
        bad = np.full(place.slot_bytes, 0xFF, np.uint8)  # NaN in FP16 and BF16
        session._cuda.upload(memory.address + place.offset(1), bad)
        session._cuda.synchronize()
    session.release(1)
    again = session.step(1, rows([5, 6, 7]), 5, want_logits=True)
    np.testing.assert_array_equal(again.logits, wanted.logits)
    np.testing.assert_array_equal(again.next_tokens, wanted.next_tokens)


def test_rows_past_the_length_are_not_read(gpu_engine: EngineDir) -> None:
    """Huge but finite ones: NaN there is what `release` guards against."""
    results = []
    for value in (0, 0x66):  # 0x6666: 1638 in FP16, 2.7e23 in BF16
        session = session_of(gpu_engine)
        for memory in session._caches:
            session._cuda.upload(memory.address, np.full(memory.num_bytes, value, np.uint8))
            session._cuda.synchronize()
        for slot in range(3):
            first = session.step(slot, rows([9, 8, 7]), 5)
            row = [int(first.next_tokens[0, 0])]
            result = session.step(slot, rows(row, 3), 5, want_logits=True)
            results.append((result.next_tokens.tolist(), result.logits))
    for tokens, logits in results[1:]:
        assert tokens == results[0][0]
        np.testing.assert_array_equal(logits, results[0][1])


def test_compiled_kernels_are_kept(
    gpu_engine: EngineDir, cuda: CudaDevice, tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if gpu_engine.config.backend != TENSORRT_RTX:
        pytest.skip("only RTX compiles kernels at run time")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    wanted = session_of(gpu_engine).step(0, rows([5, 6]), 5).next_tokens.tolist()
    sha256 = gpu_engine.manifest["files"][ENGINE]["sha256"]
    key = CacheKey("runtime", sha256, cuda.uuid, load_flavor(TENSORRT_RTX).__version__)
    assert key.path.stat().st_size > 0
    assert session_of(gpu_engine).step(0, rows([5, 6]), 5).next_tokens.tolist() == wanted
