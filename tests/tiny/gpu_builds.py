"""What the tests that build with TensorRT share: choices, and geometries of the recipes' pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dflash_trt.build import tensorrt
from dflash_trt.checkpoint import TensorInfo
from dflash_trt.config import (
    AttentionConfig,
    DrafterConfig,
    LayerMask,
    PairConfig,
    RopeConfig,
    TargetConfig,
)
from dflash_trt.engine_dir import EngineDir
from dflash_trt.gpu import Gpu
from dflash_trt.lower.trt_weights import Stack, TrtWeights, stacked
from dflash_trt.quantize.floats import quantize_fp8, quantize_nvfp4

GpuBuild = Callable[..., EngineDir]
GPU_CHOICES: dict[str, Any] = {
    "device": "sm120", "max_seq_len": 96, "max_slots": 3, "prefill_chunk": 32
}  # fmt: skip
LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
VOCAB, INTERMEDIATE = 1024, 512


def _pair(
    family: str, hidden: int, heads: tuple[int, int, int], theta: float, block: int, *,
    tied: bool = False, features: int = 5, rope: dict[str, float] | None = None,
) -> PairConfig:  # fmt: skip
    """Two target layers and one of the drafter, at full width; a small vocabulary and MLP."""

    def attention(shape: tuple[int, int, int], qk_norm: bool) -> AttentionConfig:
        kind = RopeConfig(theta, "llama3", dict(rope)) if rope else RopeConfig(theta)
        return AttentionConfig(*shape, qk_norm=qk_norm, qkv_bias=False, o_bias=False, rope=kind)

    common: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": INTERMEDIATE,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 40_960,
    }  # fmt: skip
    target = TargetConfig(
        **common, family=family, num_layers=2, tie_word_embeddings=tied, mlp_bias=False,
        attention=attention(heads, family == "qwen3"), masks=(LayerMask(True),) * 2,
        eos_token_ids=(1,), bos_token_id=None,
    )  # fmt: skip
    drafter = DrafterConfig(
        **common, num_layers=1, attention=attention(heads, True),
        masks=(LayerMask(False),), block_size=block, mask_token_id=VOCAB - 1,
        target_layer_ids=tuple(i % 2 for i in range(features)), num_target_layers=2,
        target_hidden_size=hidden, own_embedding=False, own_lm_head=False,
        input_embedding_scale=1.0, output_multiplier=1.0, final_logit_softcapping=None,
    )  # fmt: skip
    return PairConfig(target, drafter)


# Hidden size, (query heads, key/value heads, head dim), rotary base, block: from their configs.
GEOMETRIES = {
    "smollm2-135m": _pair(
        "llama", 576, (9, 3, 64), 1e5, 16, tied=True, features=3
    ),
    "qwen3-4b": _pair("qwen3", 2560, (32, 8, 128), 1e6, 16, tied=True),
    "qwen3-8b": _pair("qwen3", 4096, (32, 8, 128), 1e6, 16),
    "llama-3.1-8b": _pair("llama", 4096, (32, 8, 128), 5e5, 10, rope=LLAMA3),
}  # fmt: skip


def pretend_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], uuid: str = "a1"
) -> None:
    """Let the machine have a GPU, as far as a build asks."""
    monkeypatch.setattr(tensorrt, "load_runtime", lambda: None)
    monkeypatch.setattr(tensorrt, "first_gpu", lambda _: Gpu(capability, "NVIDIA X", uuid))


class RandomWeights(TrtWeights):
    """Weights of any tensor that a net asks for; equal shapes have equal values."""

    def __init__(self, pair: PairConfig, format_of: Callable[[str], str | None]) -> None:
        super().__init__(self, format_of)  # type: ignore[arg-type]  # `canonical` and `info` are used
        self._facts = pair
        self._values: dict[tuple[int, ...], npt.NDArray[np.float32]] = {}
        self._packed: dict[object, Stack] = {}

    def canonical(self, name: str) -> str:
        """The owner of a shared tensor."""
        table, head = "target.embed_tokens.weight", "target.lm_head.weight"
        owner = table if self._facts.target.tie_word_embeddings else head
        shared = {
            head: owner,
            "drafter.lm_head.weight": owner,
            "drafter.embed_tokens.weight": table,
        }
        return shared.get(name, name)

    def info(self, name: str) -> TensorInfo:
        """As if no checkpoint said anything of it."""
        return TensorInfo(name, (), "F32", Path())

    def dense(self, name: str, shape: Sequence[int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Random values of a type."""
        key = (self.canonical(name), dtype)
        if key not in self._dense:
            self._dense[key] = self.keep(self._random(shape).astype(dtype))
        return self._dense[key].reshape(shape)

    def quantized(self, names: Sequence[str], sizes: Sequence[int], width: int) -> Stack | None:
        """Random values through the real quantizers."""
        kind = self.format_of(names[0])
        if kind is None:
            return None
        key = (kind, *sizes, width)
        if key not in self._packed:
            quantize = {"fp8": quantize_fp8, "nvfp4": quantize_nvfp4}[kind]
            self._packed[key] = stacked([quantize(self._random((n, width))) for n in sizes])
        return self._packed[key]

    def _random(self, shape: Sequence[int]) -> npt.NDArray[np.float32]:
        key = tuple(shape)
        if key not in self._values:
            generator = np.random.default_rng(len(self._values))
            made = generator.standard_normal(key, dtype=np.float32)
            self._values[key] = made / np.float32(max(1, key[-1]) ** 0.5)
        return self._values[key]
