"""Which tensors a model must have, and of what shape; compared before any weight is read."""

from __future__ import annotations

import re

from dflash_trt.checkpoint.gguf_header import SUPPORTED_TYPES
from dflash_trt.checkpoint.quantized_config import SCHEMES
from dflash_trt.checkpoint.tensors import UNQUANTIZED, TensorSource, missing, shown
from dflash_trt.config import AttentionConfig, DFlash2Config, DrafterConfig, TargetConfig
from dflash_trt.errors import BadTensor, MissingTensor

Shapes = dict[str, tuple[int, ...]]

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"  # a target's
SELECTOR, SIDES = "candidate_selector.", ("predecessor", "successor")  # a DFlash 2 drafter's

# What quantizers store beside or instead of a weight.
_QUANTIZED = re.compile(
    r"scale|_packed$|\.(weight_shape|qweight|biases|SCB)$|qzeros|zero_point|g_idx|_blocks$|absmax"
    r"|quant_(map|state)"
)


def target_shapes(config: TargetConfig) -> Shapes:
    """All weights of a target under Hugging Face names."""
    hidden = config.hidden_size
    shapes: Shapes = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        shapes |= _layer(
            f"model.layers.{layer}", hidden, config.intermediate_size, config.attention,
            config.mlp_bias,
        )  # fmt: skip
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    return shapes


def drafter_shapes(config: DrafterConfig) -> Shapes:
    """All weights of a DFlash drafter under z-lab's names."""
    hidden = config.hidden_size
    features = len(config.target_layer_ids) * config.target_hidden_size
    shapes: Shapes = {"fc.weight": (hidden, features), "hidden_norm.weight": (hidden,)}
    for layer in range(config.num_layers):
        shapes |= _layer(
            f"layers.{layer}", hidden, config.intermediate_size, config.attention, mlp_bias=False
        )
    shapes["norm.weight"] = (hidden,)
    if config.own_embedding:
        shapes["embed_tokens.weight"] = (config.vocab_size, hidden)
    if config.own_lm_head:
        shapes["lm_head.weight"] = (config.head_rows, hidden)
    return shapes if config.dflash2 is None else shapes | _dflash2(config, config.dflash2)


def _dflash2(config: DrafterConfig, own: DFlash2Config) -> Shapes:
    """What DFlash 2 adds. Axis 0 of a base kernel: before the sublayer, behind it."""
    hidden, table = config.hidden_size, (config.vocab_size, own.selector_rank)
    dynamic = 2 * own.taps * (hidden // own.group_size)
    shapes: Shapes = {f"{SELECTOR}{side}_codebook": table for side in SIDES}
    shapes[f"{SELECTOR}hidden_projection.weight"] = (own.selector_rank, hidden)
    for layer in range(config.num_layers):
        for part in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{layer}.{part}.base_kernel"] = (2, own.taps, hidden)
            shapes[f"layers.{layer}.{part}.kernel_projection.weight"] = (dynamic, hidden)
    return shapes


def check_shapes(shapes: Shapes, source: TensorSource) -> None:
    """Compare names, types and shapes with the files.

    Raises `MissingTensor`, or `BadTensor` for a wrong type or shape or a tensor that nothing would
    use: an unknown weight changes what the model computes, so it is never dropped in silence.
    """
    present = set(source.names())
    for name in source.names():  # first of all: it explains whatever else is wrong
        if name not in shapes and _QUANTIZED.search(name):
            raise BadTensor(
                f"{source.info(name).file}: tensor {shown(name)} is there: the checkpoint is "
                "quantized in a way that is not supported",
                UNQUANTIZED,
            )
    for name, shape in shapes.items():
        if name not in present:
            raise _missing_or_bias(source, name)
        info = source.info(name)
        if info.dtype not in SUPPORTED_TYPES and info.dtype not in SCHEMES:
            raise BadTensor(
                f"{info.file}: tensor {name} has type {info.dtype}, which is not supported",
                UNQUANTIZED,
            )
        if info.shape != shape:
            raise BadTensor(
                f"{info.file}: tensor {name} has shape {list(info.shape)}, "
                f"but the config makes it {list(shape)}"
            )
    for name in source.names():
        if name not in shapes:
            raise _unknown(source, name)


def check_layer_count(num_layers: int, source: TensorSource) -> None:
    """Refuse a layer count that the files cannot hold, before tables of that length are made."""
    if num_layers > len(source.names()):
        raise MissingTensor(
            f"{source.path}: the config has {num_layers} layers, "
            f"but there are only {len(source.names())} tensors",
            "download the checkpoint again",
        )


def _layer(
    prefix: str, hidden: int, intermediate: int, attention: AttentionConfig, mlp_bias: bool
) -> Shapes:
    head_dim = attention.head_dim
    query, key = attention.num_heads * head_dim, attention.num_kv_heads * head_dim
    shapes: Shapes = {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.self_attn.q_proj.weight": (query, hidden),
        f"{prefix}.self_attn.k_proj.weight": (key, hidden),
        f"{prefix}.self_attn.v_proj.weight": (key, hidden),
        f"{prefix}.self_attn.o_proj.weight": (hidden, query),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
        f"{prefix}.mlp.gate_proj.weight": (intermediate, hidden),
        f"{prefix}.mlp.up_proj.weight": (intermediate, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, intermediate),
    }
    if attention.qk_norm:
        shapes[f"{prefix}.self_attn.q_norm.weight"] = (head_dim,)
        shapes[f"{prefix}.self_attn.k_norm.weight"] = (head_dim,)
    if attention.qkv_bias:
        shapes[f"{prefix}.self_attn.q_proj.bias"] = (query,)
        shapes[f"{prefix}.self_attn.k_proj.bias"] = (key,)
        shapes[f"{prefix}.self_attn.v_proj.bias"] = (key,)
    if attention.o_bias:
        shapes[f"{prefix}.self_attn.o_proj.bias"] = (hidden,)
    if mlp_bias:
        shapes[f"{prefix}.mlp.gate_proj.bias"] = (intermediate,)
        shapes[f"{prefix}.mlp.up_proj.bias"] = (intermediate,)
        shapes[f"{prefix}.mlp.down_proj.bias"] = (hidden,)
    return shapes


def _bias_key(name: str) -> str:
    return "mlp_bias" if ".mlp." in name else "attention_bias"


def _missing_or_bias(source: TensorSource, name: str) -> MissingTensor:
    error = missing(source.path, name)
    if name.endswith(".bias"):
        error.hint = f"the model has {_bias_key(name)} set"
    return error


def _unknown(source: TensorSource, name: str) -> BadTensor:
    if name.endswith("_proj.bias"):
        return BadTensor(
            f"{source.info(name).file}: has tensor {shown(name)}, "
            f"but the model has {_bias_key(name)} off"
        )
    return BadTensor(
        f"{source.info(name).file}: tensor {shown(name)} is not part of this architecture",
        "a weight that the engine would not use is never dropped in silence",
    )
