"""The measures of `serving.py`, which need aiohttp, tritonclient and the servers of `make test`."""

from __future__ import annotations

import asyncio
import http.client
import json
import queue
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import tritonclient.grpc as grpcclient

from dflash_trt.decode.engine import Engine
from dflash_trt.decode.request import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "serve"))
from running import Server, serving
from tensors import grpc_input

PROMPT = "A bicycle stays upright while it is moving forward, because"
NUM_TOKENS = 24
SHORT = 8  # tokens of each of many
WIDTH = 4
ROUNDS = 4
CLIENTS = 1000
QUEUE = 64
LEAVERS = 2000
AT_ONCE = 32


class Way:
    """One way to the engine: seconds to the first token, and to the end."""

    def __init__(self, name: str, ask: Callable[[int], tuple[float, float]]) -> None:
        self.name = name
        self.ask = ask


def in_process(engine: Engine) -> Iterator[Way]:
    """The engine in this process, by its loop."""
    ids = engine.tokenizer.encode(PROMPT)
    loop = engine.start(WIDTH)

    def ask(num_tokens: int) -> tuple[float, float]:
        started = time.perf_counter()
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        deltas = iter(loop.submit(ids, params))
        first = None
        for delta in deltas:
            if delta.text and first is None:  # servers send nothing for a token without text
                first = time.perf_counter() - started
        end = time.perf_counter() - started
        return first or end, end

    yield Way("in-process", ask)
    loop.close()


def over_grpc(server: Server) -> Way:
    """Triton's gRPC stream."""
    local = threading.local()

    def ask(num_tokens: int) -> tuple[float, float]:
        if not hasattr(local, "client"):
            local.results = queue.SimpleQueue()
            local.client = grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc}")
            put = local.results.put
            local.client.start_stream(
                lambda result, error: put((time.perf_counter(), result, error))
            )
        inputs = [
            grpc_input("text_input", PROMPT), grpc_input("max_tokens", num_tokens),
            grpc_input("end_id", -1), grpc_input("stream", True),
        ]  # fmt: skip
        started = time.perf_counter()
        local.client.async_stream_infer("ensemble", inputs, enable_empty_final_response=True)
        first = None
        while True:
            at, result, error = local.results.get()
            assert error is None, error
            first = first or at
            if result.get_response().parameters["triton_final_response"].bool_param:
                return first - started, at - started

    return Way("Triton gRPC", ask)


def over_http(server: Server, name: str) -> Way:
    """Triton's HTTP stream, or OpenAI's completions."""
    local = threading.local()
    port = server.http if name == "Triton HTTP" else server.openai
    path = "/v2/models/ensemble/generate_stream" if name == "Triton HTTP" else "/v1/completions"

    def ask(num_tokens: int) -> tuple[float, float]:
        if not hasattr(local, "line"):
            local.line = http.client.HTTPConnection("127.0.0.1", port)
        body: dict[str, Any] = {"max_tokens": num_tokens, "stream": True}
        if name == "Triton HTTP":
            body |= {"text_input": PROMPT, "end_id": -1}
        else:
            body |= {"prompt": PROMPT, "ignore_eos": True, "temperature": 0}
        started = time.perf_counter()
        local.line.request("POST", path, json.dumps(body))
        answer = local.line.getresponse()
        answer.readline()
        first = time.perf_counter() - started
        answer.read()
        return first, time.perf_counter() - started

    return Way(name, ask)


def overhead(path: Path, threads: int) -> None:
    """Ways in turn, so that a drift of the machine meets all of them."""
    engine = Engine.load(path, threads)
    slots = engine.session.limits.max_slots
    with serving(path, "--width", str(WIDTH), "--threads", str(threads)) as server:
        own = in_process(engine)
        ways = [
            next(own), over_grpc(server), over_http(server, "Triton HTTP"),
            over_http(server, "OpenAI"),
        ]  # fmt: skip
        firsts: dict[str, list[float]] = {way.name: [] for way in ways}
        rates: dict[str, list[float]] = {way.name: [] for way in ways}
        with ThreadPoolExecutor(slots) as pool:
            for number in range(ROUNDS + 1):  # the first is to warm up
                for way in ways[number % 4 :] + ways[: number % 4]:
                    alone = [way.ask(2)[0] for _ in range(8)]
                    started = time.perf_counter()
                    list(pool.map(way.ask, [NUM_TOKENS] * (2 * slots)))
                    rate = 2 * slots * NUM_TOKENS / (time.perf_counter() - started)
                    if number:
                        firsts[way.name] += alone
                        rates[way.name].append(rate)
        base_first = statistics.median(firsts["in-process"])
        print(f"{'':12} {'first token':>12} {'added':>9} {'tokens/s':>9} {'of in-process':>14}")
        for way in ways:
            first = statistics.median(firsts[way.name])
            ratio = statistics.median(
                a / b for a, b in zip(rates[way.name], rates["in-process"], strict=True)
            )
            print(
                f"{way.name:12} {1e3 * first:9.1f} ms {1e3 * (first - base_first):6.1f} ms "
                f"{statistics.median(rates[way.name]):9.1f} {100 * ratio:13.1f}%"
            )
        for _ in own:
            pass


def expected_text(path: Path, threads: int, prompt: str, num_tokens: int) -> str:
    """What the engine makes of a prompt, in this process."""
    engine = Engine.load(path, threads)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return engine.generate(engine.tokenizer.encode(prompt), params).text


async def http_stream(
    session: aiohttp.ClientSession, server: Server, prompt: str, num_tokens: int, openai: bool
) -> tuple[int, str]:
    """Status and text of one stream."""
    body: dict[str, Any] = {"max_tokens": num_tokens, "stream": True}
    if openai:
        url = server.openai_url("/v1/completions")
        body |= {"prompt": prompt, "ignore_eos": True, "temperature": 0}
    else:
        url = server.url("/v2/models/ensemble/generate_stream")
        body |= {"text_input": prompt, "end_id": -1}
    text = ""
    async with session.post(url, json=body) as answer:
        if answer.status != 200:
            return answer.status, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return 503, str(event["error"])
                text += event["choices"][0]["text"] if openai else event["text_output"]
    return 200, text


def overload(path: Path, threads: int) -> None:
    """Every client must get the right text or a clear refusal."""
    wanted = expected_text(path, threads, PROMPT, SHORT)

    async def run(server: Server) -> Counter[str]:
        ends: Counter[str] = Counter()
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

            async def one(number: int) -> None:
                try:
                    status, text = await http_stream(
                        session, server, PROMPT, SHORT, number % 2 == 0
                    )
                except (aiohttp.ClientError, TimeoutError) as error:
                    ends[f"FAILED {type(error).__name__}"] += 1
                    return
                if status == 200:
                    ends["right text" if text == wanted else "WRONG text"] += 1
                else:
                    # Triton's own HTTP says 400 to whatever ends a stream before its first event.
                    is_clear = status in (400, 503) and "requests run or wait" in text
                    ends["unavailable" if is_clear else f"UNCLEAR {status} {text[:80]}"] += 1

            await asyncio.gather(*(one(number) for number in range(CLIENTS)))
        return ends

    flags = ("--queue", str(QUEUE), "--threads", str(threads), "--width", str(WIDTH))
    with serving(path, *flags) as server:
        started = time.perf_counter()
        ends = asyncio.run(run(server))
        print(f"{CLIENTS} clients, queue {QUEUE}: {time.perf_counter() - started:.1f} s")
        for end, count in sorted(ends.items()):
            print(f"  {count:5} {end}")
        print(f"  afterwards idle: {server.is_idle()}")


def resident_mb(pid: int) -> float:
    """Memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def leave(path: Path, threads: int) -> None:
    """Nothing may stay behind, and the steady client must get its texts."""
    wanted = expected_text(path, threads, PROMPT, SHORT)

    async def run(server: Server, count: int) -> Counter[str]:
        ends: Counter[str] = Counter()
        rng = random.Random(1)
        gate = asyncio.Semaphore(AT_ONCE)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def steady() -> None:
                while True:
                    status, text = await http_stream(session, server, PROMPT, SHORT, True)
                    ends["steady, right" if text == wanted else f"STEADY, WRONG {status}"] += 1

            async def leaver(number: int) -> None:
                async with gate:
                    work = http_stream(session, server, "Gone.", 400, number % 2 == 0)
                    try:
                        status, _ = await asyncio.wait_for(work, rng.uniform(0.0, 0.6))
                        ends[f"leaver was answered {status}"] += 1
                    except TimeoutError:
                        ends["left"] += 1

            staying = asyncio.create_task(steady())
            await asyncio.gather(*(leaver(number) for number in range(count)))
            staying.cancel()
            await asyncio.gather(staying, return_exceptions=True)
        return ends

    flags = ("--queue", "200", "--threads", str(threads), "--width", str(WIDTH))
    with serving(path, *flags) as server:
        engine_pid = server.engine_pid()
        asyncio.run(run(server, LEAVERS // 4))  # to warm up: memory grows to its working size
        before = resident_mb(engine_pid)
        started = time.perf_counter()
        ends = asyncio.run(run(server, LEAVERS))
        print(f"{LEAVERS} clients that leave: {time.perf_counter() - started:.1f} s")
        for end, count in sorted(ends.items()):
            print(f"  {count:5} {end}")
        time.sleep(2)
        print(f"  afterwards idle: {server.is_idle()}")
        print(f"  engine's process: {before:.0f} MB before, {resident_mb(engine_pid):.0f} MB after")
