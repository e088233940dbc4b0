"""The real pair behind Triton: text of a trained model through every way in."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from running import Server, serving
from tensors import over_grpc, over_http

from dflash_trt.build.pipeline import build, plan
from dflash_trt.build.recipe import find_recipe
from dflash_trt.checkpoint.locate import locate
from dflash_trt.decode.engine import Engine
from dflash_trt.decode.request import SamplingParams
from dflash_trt.lossless.prompts import bundled_prompts, interleaved

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
NUM_PROMPTS = 12
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def real_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = find_recipe("smollm2-135m")
    assert recipe is not None
    target = str(locate(recipe.target, recipe.base))
    planned = plan(target, str(ROOT / "demo-drafter"), {"precision": "int4", "max_seq_len": 512})
    folder = tmp_path_factory.mktemp("real") / "engine"
    return build(planned, folder, force=False, progress=lambda *_: None).path


def test_chats_of_the_real_pair(real_path: Path) -> None:
    engine = Engine.load(real_path)
    chats: list[Any] = [
        [{"role": "user", "content": text}] for text in interleaved(bundled_prompts())[:NUM_PROMPTS]
    ]
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, temperature=0.5 * (i % 2), top_k=40 * (i % 2), seed=i)
        for i in range(NUM_PROMPTS)
    ]
    prompts = [engine.tokenizer.encode_chat(chat) for chat in chats]
    expected = [made.text for made in engine.generate_all(zip(prompts, params, strict=True))]

    def ask(server: Server, index: int) -> str:
        fields: dict[str, Any] = {
            "max_tokens": NUM_TOKENS, "temperature": params[index].temperature,
            "top_k": params[index].top_k, "seed": index,
        }  # fmt: skip
        if index % 3 == 2:
            extra = {"top_k": fields.pop("top_k")}
            with openai.OpenAI(base_url=server.openai_url("/v1"), api_key="-") as client:
                stream = client.chat.completions.create(
                    model=real_path.name, messages=chats[index], stream=True, extra_body=extra,
                    **fields,
                )  # fmt: skip
                return "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        send = (over_http, over_grpc)[index % 3]
        answer = send(server, messages=json.dumps(chats[index]), stream=True, **fields)
        assert answer.error == ""
        return answer.text

    with serving(real_path, "--threads", "2") as server, ThreadPoolExecutor(NUM_PROMPTS) as pool:
        texts = list(pool.map(lambda index: ask(server, index), range(NUM_PROMPTS)))
        assert server.is_idle()
    assert texts == expected
