"""Targets: a folder in Hugging Face format, or a GGUF file, as facts plus checked tensors."""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.checkpoint.facts import Facts, brief, read_json
from dflash_trt.checkpoint.gguf_target import open_gguf
from dflash_trt.checkpoint.gguf_tokenizer import load_gguf_tokenizer
from dflash_trt.checkpoint.model_facts import read_attention, read_sizes, read_windows
from dflash_trt.checkpoint.quantized import read_quantized
from dflash_trt.checkpoint.quantized_config import Quantization, read_quantization
from dflash_trt.checkpoint.safetensors import SafetensorsSource
from dflash_trt.checkpoint.shapes import (
    EMBEDDING,
    LM_HEAD,
    check_layer_count,
    check_shapes,
    target_shapes,
)
from dflash_trt.checkpoint.tensors import RenamedSource, TensorSource
from dflash_trt.config import LayerMask, TargetConfig
from dflash_trt.errors import CheckpointError, UnsupportedArchitecture
from dflash_trt.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Family:
    """How one architecture differs from the common decoder."""

    name: str
    qk_norm: bool
    has_windows: bool


FAMILIES = {
    "LlamaForCausalLM": Family("llama", qk_norm=False, has_windows=False),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, has_windows=True),
}
_ROTARY_BUFFER = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")


@dataclass(frozen=True)
class Target:
    """A target that was read and whose tensors fit its config; `notes` are for the user."""

    config: TargetConfig
    source: TensorSource
    notes: tuple[str, ...]
    quantization: Quantization | None = None


def open_target(path: Path) -> Target:
    """Read a target's facts and check its tensors; no weight bytes are read.

    Raises a `CheckpointError` that names the file and the key or tensor.
    """
    notes: list[str] = []
    quantization = None
    if is_gguf(path):
        config, source = open_gguf(path, notes)
    else:
        config, quantization = _folder_facts(path, notes)
        stored = read_quantized(SafetensorsSource(path), quantization, notes)
        source = _plain_names(config, stored)
    check_tensors(config, source)
    return Target(config, source, tuple(notes), quantization)


def is_gguf(path: Path) -> bool:
    """Whether a target is read as a GGUF file, whatever its name: Ollama's blobs have no suffix."""
    return os.path.isfile(path) and path.suffix != ".safetensors"


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a target, from a GGUF file's metadata or a folder's files.

    Raises `TokenizerError`, or `CheckpointError` for a file that is not GGUF.
    """
    return load_gguf_tokenizer(path) if is_gguf(path) else Tokenizer.load(path)


def read_target_config(path: Path) -> TargetConfig:
    """Only the facts of `open_target`; what the user should know goes to `warnings`."""
    target = open_target(path)
    for note in target.notes:
        warnings.warn(note, stacklevel=2)
    return target.config


def check_tensors(config: TargetConfig, source: TensorSource) -> None:
    """Compare the tensors' names and shapes with the config.

    Raises `MissingTensor`, or `BadTensor` naming the tensor, what was expected and what found.
    """
    check_layer_count(config.num_layers, source)
    shapes = target_shapes(config)
    if config.tie_word_embeddings and LM_HEAD in source.names():
        # A head that is tied and stored all the same: `check_tied_head` compares the values.
        shapes[LM_HEAD] = shapes[EMBEDDING]
    check_shapes(shapes, source)


def config_facts(folder: Path, notes: list[str]) -> Facts:
    """`config.json` of a checkpoint folder. Raises `CheckpointError` with what is there instead."""
    if not os.path.exists(folder):
        raise CheckpointError(f"{folder}: no such file or folder")
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder}: is a single file", "name the folder with config.json")
    path = folder / "config.json"
    if not os.path.exists(path):
        ggufs = sorted(folder.glob("*.gguf"))
        hint = f"name the file itself: {ggufs[0]}" if ggufs else "is this a checkpoint folder?"
        raise CheckpointError(f"{path}: no such file", hint)
    return Facts(path, read_json(path), notes=notes)


def folder_config(folder: Path, notes: list[str]) -> TargetConfig:
    """The facts of a folder's JSON files; the tensors may not be there yet.

    Raises a `CheckpointError` that names the file and the key.
    """
    return _folder_facts(folder, notes)[0]


def _folder_facts(folder: Path, notes: list[str]) -> tuple[TargetConfig, Quantization | None]:
    facts = config_facts(folder, notes)
    family = _family(facts)
    quantization = read_quantization(facts)
    sizes = read_sizes(facts)
    attention = read_attention(facts, family.qk_norm)
    if family.has_windows:
        windows = read_windows(facts, sizes.num_layers)
    else:
        windows = [(False, None)] * sizes.num_layers
    if any(slides and window is None for slides, window in windows):
        facts.fail("use_sliding_window", "is false, although layer_types has sliding layers")
    if facts.has("auto_map"):
        facts.note(
            f"auto_map names code of the checkpoint's own ({brief(facts.get('auto_map'))}), which "
            f"is never run: the engine computes what transformers does for {family.name}"
        )
    config = TargetConfig(
        family=family.name,
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_layers=sizes.num_layers,
        rms_norm_eps=sizes.rms_norm_eps,
        max_position_embeddings=sizes.max_position_embeddings,
        tie_word_embeddings=facts.flag("tie_word_embeddings", default=False),
        mlp_bias=facts.flag("mlp_bias", default=False) if family.name == "llama" else False,
        attention=attention,
        masks=tuple(LayerMask(causal=True, window=window) for _, window in windows),
        eos_token_ids=_eos_ids(facts, sizes.vocab_size),
        bos_token_id=facts.token_id("bos_token_id", sizes.vocab_size),
    )
    return config, quantization


def _family(facts: Facts) -> Family:
    names = facts.strings("architectures") if facts.has("architectures") else ()
    if len(names) == 1 and names[0] in FAMILIES:
        return FAMILIES[names[0]]
    found = brief(names[0]) if len(names) == 1 else brief(list(names))
    hint = f"supported targets: {', '.join(FAMILIES)}"
    if any("DFlash" in name for name in names):
        hint = "this is a drafter: is it given as the target by mistake?"
    raise UnsupportedArchitecture(
        f"{facts.path}: architectures is {found}, which is not a supported target", hint
    )


def _eos_ids(facts: Facts, vocab_size: int) -> tuple[int, ...]:
    """Stop ids: those of generation_config.json, then those of config.json."""
    places = [facts]
    generation = facts.path.parent / "generation_config.json"
    if os.path.exists(generation):
        places.insert(0, Facts(generation, read_json(generation), notes=facts.notes))
    ids: dict[int, None] = {}
    for place in places:
        value = place.get("eos_token_id")
        if isinstance(value, list) and value:
            ids |= dict.fromkeys(place.integers("eos_token_id", high=vocab_size - 1))
        elif value != []:
            token_id = place.token_id("eos_token_id", vocab_size)
            ids |= {} if token_id is None else {token_id: None}
    if not ids:
        facts.note("names no eos_token_id: generation ends only at its length limit")
    return tuple(ids)


def _plain_names(config: TargetConfig, source: TensorSource) -> TensorSource:
    """Without the rotary tables of old files, which follow from the config."""
    stored = {name: name for name in source.names() if not _ROTARY_BUFFER.fullmatch(name)}
    if config.tie_word_embeddings and EMBEDDING not in stored and LM_HEAD in stored:
        stored[EMBEDDING] = stored.pop(LM_HEAD)  # one matrix, saved under its other name
    return RenamedSource(source, stored)
