"""Random, seeded targets (transformers) and drafters (dflash), saved as checkpoint folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

VOCAB = 160
HIDDEN = 48
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
}
MASK_ID = VOCAB - 1
# A small DFlash 2; HIDDEN is a multiple of its groups.
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}


@dataclass(frozen=True)
class TinyPair:
    """Two models in memory and the folders that hold the same weights."""

    target: Any
    drafter: Any
    target_dir: Path
    drafter_dir: Path
    draft_ids: tuple[int, ...] | None = None  # of the drafter's own draft vocabulary

    @property
    def block(self) -> int:
        """The block size that the drafter names."""
        return int(self.drafter.block_size)


def save_target(folder: Path, family: str = "qwen3", seed: int = 0, **options: Any) -> Any:
    """A float32 target of `family` with a tokenizer beside it; returns the model."""
    config_class, model_class = FAMILIES[family]
    model = model_class(config_class(**{**SIZES, **options})).eval()
    _randomize(model, seed)
    model.save_pretrained(folder)
    # The references end where the tests say, not where the checkpoint does.
    model.generation_config.eos_token_id = None
    _save_tokenizer(folder, int(model.config.vocab_size))
    return model


def save_drafter(
    folder: Path,
    target: Any,
    *,
    seed: int = 1,
    block: int = 4,
    layer_ids: Sequence[int] = (0, 2),
    dflash: dict[str, Any] | None = None,
    dflash2: dict[str, Any] | None = None,
    weights: dict[str, torch.Tensor] | None = None,
    **options: Any,
) -> Any:
    """A drafter for `target`; `dflash` adds to dflash_config, `weights` replaces random ones.

    With `dflash2`, keys that differ from `DFLASH2`, it is a DFlash 2 drafter.
    """
    sizes = {**SIZES, "num_hidden_layers": 2, **options}
    if dflash2 is not None:
        sizes = {"is_causal": False, **sizes}
        dflash = {**DFLASH2, **(dflash or {}), **dflash2}
    for name in ("vocab_size", "hidden_size"):
        sizes[name] = getattr(target.config, name)
    config = Qwen3Config(
        **sizes,
        num_target_layers=target.config.num_hidden_layers,
        block_size=block,
        dflash_config={
            "target_layer_ids": list(layer_ids),
            "mask_token_id": min(MASK_ID, target.config.vocab_size - 1),
            **(dflash or {}),
        },
    )
    drafter = (DFlashDraftModel if dflash2 is None else DFlash2DraftModel)(config).eval()
    _randomize(drafter, seed)
    if weights is not None:
        drafter.load_state_dict(weights)
    _save_drafter(folder, drafter)
    _edit_config(folder, auto_map={"AutoModel": f"dflash.{type(drafter).__name__}"})
    return drafter


def _save_drafter(folder: Path, drafter: Any) -> None:
    """As z-lab stores it: codebooks have no `.weight` in their names."""
    drafter.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    plain = {name.replace("_codebook.weight", "_codebook"): t for name, t in tensors.items()}
    if plain.keys() != tensors.keys():
        save_file(plain, file, {"format": "pt"})


def save_pair(
    root: Path,
    family: str = "qwen3",
    *,
    seed: int = 0,
    target: dict[str, Any] | None = None,
    draft_ids: Sequence[int] | None = None,
    has_own_head: bool = False,
    **drafter: Any,
) -> TinyPair:
    """A target with options `target` and a drafter with the remaining options.

    `draft_ids`: its draft vocabulary; with `has_own_head` it stores the target's rows for them.
    """
    made = save_target(root / "target", family, seed, **(target or {}))
    draft = save_drafter(root / "drafter", made, seed=seed + 1, **drafter)
    if draft_ids is not None:
        add_draft_vocabulary(root / "drafter", made, draft_ids, has_own_head)
    ids = None if draft_ids is None else tuple(draft_ids)
    return TinyPair(made, draft, root / "target", root / "drafter", ids)


def add_draft_vocabulary(folder: Path, target: Any, ids: Sequence[int], has_own_head: bool) -> None:
    """Store a draft vocabulary as speculators does: offsets, marks, and maybe a head."""
    tokens = torch.tensor(list(ids))
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"] = tokens - torch.arange(len(tokens))
    tensors["t2d"] = torch.zeros(target.config.vocab_size, dtype=torch.bool)
    tensors["t2d"][tokens] = True
    if has_own_head:
        tensors["lm_head.weight"] = target.get_output_embeddings().weight.detach()[tokens]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    _edit_config(folder, draft_vocab_size=len(tokens))


def train_drafter(pair: TinyPair, texts: torch.Tensor, prompt: int, steps: int) -> None:
    """Fit the drafter to continue `texts` [N, T] behind any position from `prompt` on; save it."""
    drafter, target, block = pair.drafter, pair.target, pair.block
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        states = target(texts, output_hidden_states=True).hidden_states
        features = torch.cat([states[i + 1] for i in drafter.target_layer_ids], dim=-1)
    table, head = target.get_input_embeddings().weight.detach(), target.lm_head.weight.detach()
    optimizer = torch.optim.Adam(drafter.parameters(), lr=2e-3)
    mask = torch.full((len(texts), block), drafter.mask_token_id)
    drafter.train()
    for _ in range(steps):
        last = texts.shape[1] - block
        start = int(torch.randint(prompt, last + 1, (1,), generator=generator))
        ids = mask.clone()
        ids[:, 0] = texts[:, start]
        hidden = drafter(
            target_hidden=features[:, :start],
            noise_embedding=torch.nn.functional.embedding(ids, table),
            position_ids=torch.arange(start + block)[None],
        )
        logits = hidden[:, 1:] @ head.T
        selector = getattr(drafter, "candidate_selector", None)
        if selector is not None:  # scores behind the right token, of all candidates
            before = selector.predecessor_codebook(texts[:, start : start + block - 1])
            state = before * selector.hidden_projection(hidden[:, 1:])
            logits = logits + state @ selector.successor_codebook.weight.T
        wanted = texts[:, start + 1 : start + block]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    drafter.eval()
    _save_drafter(pair.drafter_dir, drafter)


def _randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights that all matter: no bias is zero, no norm is one, attention is far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif name.endswith("base_kernel"):  # the row itself counts most, as after a training
                parameter.copy_(0.4 * noise)
                parameter[:, 0] += 1
            elif name.endswith("embed_tokens.weight"):
                parameter.copy_(noise)
            elif name.endswith("_codebook.weight"):
                parameter.copy_(0.5 * noise)
            else:
                gain = 3.0 if name.endswith(("q_proj.weight", "lm_head.weight")) else 1.2
                gain = 0.4 if name.endswith("kernel_projection.weight") else gain
                parameter.copy_(gain * noise / parameter.shape[1] ** 0.5)


def _save_tokenizer(folder: Path, vocab_size: int) -> None:
    """One character per token, readable ASCII first, so a text shows its ids."""
    stand_in = dict(_byte_alphabet())
    order = [*range(0x20, 0x7F), *range(0x20), 0x7F, *range(0x100, 0x100 + vocab_size)]
    tokens = ["".join(stand_in[b] for b in chr(code).encode()) for code in order[:vocab_size]]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


def _byte_alphabet() -> list[tuple[int, str]]:
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return [(b, chr(b)) for b in plain] + [(b, chr(256 + i)) for i, b in enumerate(others)]


def _edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=2))
