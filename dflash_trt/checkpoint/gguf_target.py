"""GGUF metadata of a target model as `TargetConfig`."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from dflash_trt.checkpoint.facts import MAX_LAYERS, Facts, brief
from dflash_trt.checkpoint.gguf import ROPE_TABLE, GgufSource, RotatedRows
from dflash_trt.checkpoint.gguf_header import GgufHeader, read_header
from dflash_trt.checkpoint.model_facts import checked_attention, divided_head_dim
from dflash_trt.checkpoint.tensors import RenamedSource, TensorSource, shown
from dflash_trt.config import AttentionConfig, LayerMask, RopeConfig, TargetConfig
from dflash_trt.errors import BadTensor, UnsupportedArchitecture

# Architecture -> (per-head q/k norm, q and k rows permuted by the converter).
ARCHITECTURES = {"llama": (False, True), "qwen3": (True, False)}

# Keys that change the arithmetic in a way that we do not reproduce, with the values that do not.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "use_parallel_residual": (0,),
    "full_attention_interval": (0,),
    "nextn_predict_layers": (0,),
    "rescale_every_n_layers": (0,),
    "hidden_activation": ("silu",),
    "attention.causal": (1,),
    "attention.sliding_window": (0,),
    "attention.scale": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.clamp_kqv": (0,),
    "attention.q_lora_rank": (0,),
    "attention.kv_lora_rank": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.output_scale": (0, 1),
    "attention.temperature_scale": (0,),
    "attention.temperature_length": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "rope.scale_linear": (1,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.scaling.yarn_log_multiplier": (0,),
}
USED = (
    "context_length", "embedding_length", "feed_forward_length", "block_count", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "rope.freq_base",
    "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)  # fmt: skip
# About experts and sliding windows, refused where there are any, and about other kinds of norms.
HARMLESS = frozenset(
    {
        "expert_used_count", "tensor_data_layout", "rope.scaling.finetuned", "rope.freq_base_swa",
        "rope.dimension_count_swa", "attention.layer_norm_epsilon", "attention.group_norm_epsilon",
        "attention.group_norm_groups", "attention.key_length_swa", "attention.value_length_swa",
        "attention.sliding_window_pattern", "attention.relative_buckets_count",
    }
)  # fmt: skip
# What a key is called that a later converter adds for arithmetic.
_ARITHMETIC = re.compile(
    r"(^|[._])(attention|attn|rope|nope|scale|multiplier|softcap(ping)?|clamp|sparsity)([._]|$)"
)


def open_gguf(path: Path, notes: list[str]) -> tuple[TargetConfig, TensorSource]:
    """Facts and tensors of a GGUF target. Raises `CheckpointError` naming key or tensor."""
    header = read_header(path)
    facts = Facts(path, header.metadata, notes=notes)
    arch = facts.text("general.architecture")
    if arch not in ARCHITECTURES:
        raise UnsupportedArchitecture(
            f"{path}: general.architecture is {brief(arch)}, which is not a supported target",
            f"supported GGUF architectures: {', '.join(ARCHITECTURES)}",
        )
    _refuse_variants(facts, arch)
    qk_norm, permuted = ARCHITECTURES[arch]
    num_heads = facts.integer(f"{arch}.attention.head_count", high=65_536)
    num_kv_heads = facts.integer(f"{arch}.attention.head_count_kv", high=65_536)
    head_dim = _head_dim(facts, arch, num_heads)
    source = GgufSource(
        header, RotatedRows(num_heads, num_kv_heads, head_dim) if permuted else None
    )
    rope = _rope(facts, arch, head_dim, source)
    biases = (_has(header, "blk.0.attn_q.bias"), _has(header, "blk.0.attn_output.bias"))
    attention = checked_attention(facts, num_heads, num_kv_heads, head_dim, qk_norm, biases, rope)
    config = _config(facts, arch, header, attention)
    named = {name: name for name in source.names() if name != ROPE_TABLE}
    return config, RenamedSource(source, named)


def _config(
    facts: Facts, arch: str, header: GgufHeader, attention: AttentionConfig
) -> TargetConfig:
    num_layers = facts.integer(f"{arch}.block_count", high=MAX_LAYERS)
    vocab_size = _vocab_size(facts, arch, header)
    return TargetConfig(
        family=arch,
        vocab_size=vocab_size,
        hidden_size=facts.integer(f"{arch}.embedding_length"),
        intermediate_size=facts.integer(f"{arch}.feed_forward_length"),
        num_layers=num_layers,
        rms_norm_eps=facts.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        max_position_embeddings=facts.integer(f"{arch}.context_length"),
        tie_word_embeddings=not _has(header, "output.weight"),
        mlp_bias=_has(header, "blk.0.ffn_gate.bias"),
        attention=attention,
        masks=(LayerMask(causal=True),) * num_layers,
        eos_token_ids=_eos_ids(facts, vocab_size),
        bos_token_id=facts.token_id("tokenizer.ggml.bos_token_id", vocab_size),
    )


def _has(header: GgufHeader, name: str) -> bool:
    return name in header.tensors


def _refuse_variants(facts: Facts, arch: str) -> None:
    if facts.has("split.count") and facts.integer("split.count", low=0) > 1:
        raise UnsupportedArchitecture(
            f"{facts.path}: is one of {facts.get('split.count')} parts of a split GGUF",
            "join them with llama.cpp's `llama-gguf-split --merge`",
        )
    for name, value in facts.data.items():
        key = name.removeprefix(f"{arch}.")
        if key == name or key in USED or key in HARMLESS:
            continue
        if key in NEUTRAL:
            if value not in NEUTRAL[key]:
                raise UnsupportedArchitecture(
                    f"{facts.path}: {shown(name)} {brief(value)} is not supported"
                )
        elif value != 0 and _ARITHMETIC.search(key) and not key.startswith("expert_"):
            raise UnsupportedArchitecture(
                f"{facts.path}: {shown(name)} {brief(value)}: what it does to the model is unknown"
            )
        else:
            facts.note(f"{shown(name)} is not used")


def _head_dim(facts: Facts, arch: str, num_heads: int) -> int:
    key, rotary = f"{arch}.attention.key_length", f"{arch}.rope.dimension_count"
    if facts.has(key):
        head_dim = facts.integer(key, high=65_536)
    elif facts.has(rotary):
        head_dim = facts.integer(rotary, high=65_536)
    else:
        head_dim = divided_head_dim(facts, facts.integer(f"{arch}.embedding_length"), num_heads)
    if facts.has(rotary) and facts.integer(rotary, high=65_536) != head_dim:
        raise UnsupportedArchitecture(
            f"{facts.path}: {rotary} {facts.get(rotary)} differs from head_dim {head_dim}: "
            "partial rotary embedding is not supported"
        )
    value_key = f"{arch}.attention.value_length"
    if facts.has(value_key) and facts.integer(value_key, high=65_536) != head_dim:
        raise UnsupportedArchitecture(
            f"{facts.path}: {value_key} {facts.get(value_key)} differs from head_dim {head_dim}"
        )
    return head_dim


def _rope(facts: Facts, arch: str, head_dim: int, source: GgufSource) -> RopeConfig:
    theta = facts.number(f"{arch}.rope.freq_base")
    kind_key, factor_key = f"{arch}.rope.scaling.type", f"{arch}.rope.scaling.factor"
    has_factor = facts.has(factor_key) and facts.get(factor_key) != 0
    # llama.cpp reads a factor without a type as linear.
    kind = facts.text(kind_key) if facts.has(kind_key) else ("linear" if has_factor else "none")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedArchitecture(
            f"{facts.path}: {kind_key} {brief(kind)} is not supported",
            "supported: none, linear, yarn",
        )
    if ROPE_TABLE in source.names():
        if kind != "none":
            raise UnsupportedArchitecture(
                f"{facts.path}: {kind_key} {kind} together with tensor rope_freqs is not supported"
            )
        return _table(theta, head_dim, source)
    if kind == "none":
        return RopeConfig(theta)
    factor = facts.number(factor_key)
    if kind == "linear":
        return RopeConfig(theta, "linear", {"factor": factor})
    params: dict[str, float | int] = {
        "factor": factor,
        "original_max_position_embeddings": facts.integer(
            f"{arch}.rope.scaling.original_context_length"
        ),
    }
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if facts.has(f"{arch}.rope.scaling.{theirs}"):
            params[ours] = facts.number(f"{arch}.rope.scaling.{theirs}")
    return RopeConfig(theta, "yarn", params)


def _table(theta: float, head_dim: int, source: GgufSource) -> RopeConfig:
    info = source.info(ROPE_TABLE)
    if info.shape != (head_dim // 2,):
        raise BadTensor(
            f"{info.file}: tensor {ROPE_TABLE} has shape {list(info.shape)}, "
            f"expected [{head_dim // 2}]"
        )
    divisors = source.read(ROPE_TABLE)
    if not (np.isfinite(divisors).all() and (divisors > 0).all()):
        raise BadTensor(f"{info.file}: tensor {ROPE_TABLE} has a divisor that is not positive")
    return RopeConfig(theta, "table", {"divisors": tuple(float(value) for value in divisors)})


def _vocab_size(facts: Facts, arch: str, header: GgufHeader) -> int:
    """The embedding's rows: metadata may leave the size out, and must not contradict them."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise BadTensor(f"{facts.path}: tensor token_embd.weight is missing or not a matrix")
    rows = embedding.shape[0]
    declared = facts.optional_integer(f"{arch}.vocab_size")
    if declared not in (None, rows):
        raise BadTensor(
            f"{facts.path}: tensor token_embd.weight has {rows} rows, "
            f"but {arch}.vocab_size is {declared}"
        )
    return rows


def _eos_ids(facts: Facts, vocab_size: int) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for name in ("eos", "eot", "eom"):
        value = facts.token_id(f"tokenizer.ggml.{name}_token_id", vocab_size)
        if value is not None:
            ids[value] = None
    if not ids:
        facts.note("names no eos token: generation ends only at its length limit")
    return tuple(ids)
