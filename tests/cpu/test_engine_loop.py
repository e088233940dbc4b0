"""The engine loop on a real step graph: concurrent requests, exact to their solo runs."""

from __future__ import annotations

import asyncio
import random
import threading

from dflash_trt.decode.admission import RunConfig
from dflash_trt.decode.prometheus import PrometheusTelemetry
from dflash_trt.decode.request import SamplingParams
from tiny import Guarded, TinyEngine

WAIT_S = 120.0


def jobs(prompts: list[list[int]], text: str, count: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(4)
    made = []
    for _ in range(count):
        params = SamplingParams(
            max_tokens=rng.randint(1, 24),
            temperature=rng.choice([0.0, 0.7]),
            top_k=rng.choice([0, 9]),
            seed=rng.randrange(1 << 40),
            stop=[text[3:5]] if rng.random() < 0.3 else (),
        )
        made.append((rng.choice(prompts), params))
    return made


def test_concurrent_requests_of_threads_and_an_event_loop_equal_their_solo_runs(
    trained_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    text = trained_engine.generate(prompts[0], 20).text
    wanted = jobs(prompts, text, 24)
    session = trained_engine.session(Guarded, max_slots=3, prefill_chunk=5)
    telemetry = PrometheusTelemetry(session.limits.block)
    engine = trained_engine.engine(session)
    made: dict[int, list[int]] = {}
    cancelled = set(range(3, 16, 6))

    with engine.start(telemetry=telemetry, config=RunConfig(max_waiting=50)) as loop:

        def thread(mine: range) -> None:
            handles = [(i, loop.submit(*wanted[i])) for i in mine]
            for i, handle in handles:
                if i in cancelled:
                    next(handle)
                    handle.cancel()
                made[i] = handle.result(WAIT_S).token_ids

        async def task(i: int) -> None:
            handle = loop.submit(*wanted[i])
            made[i] = [token async for delta in handle for token in delta.token_ids]

        async def tasks() -> None:
            await asyncio.wait_for(asyncio.gather(*(task(i) for i in range(16, 24))), WAIT_S)

        threads = [threading.Thread(target=thread, args=(range(s, s + 8),)) for s in (0, 8)]
        for one in threads:
            one.start()
        asyncio.run(tasks())
        for one in threads:
            one.join(WAIT_S)
        assert loop.drain(WAIT_S)

    session.check_guards()
    for i, (prompt, params) in enumerate(wanted):
        solo = trained_engine.engine().generate(prompt, params).token_ids
        assert made[i] == (solo[: len(made[i])] if i in cancelled else solo)
    total = sum(map(len, made.values()))
    assert f"dflash_generated_tokens_total {total}.0" in telemetry.text().decode()


def test_requests_side_by_side_in_one_thread_equal_their_solo_runs(
    trained_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    wanted = jobs(prompts, "stop here", 8)
    made = trained_engine.engine().generate_all(wanted)
    for (prompt, params), generation in zip(wanted, made, strict=True):
        solo = trained_engine.engine().generate(prompt, params)
        assert generation.token_ids == solo.token_ids
        assert generation.text == solo.text
        assert generation.stats == solo.stats
