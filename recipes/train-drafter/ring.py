"""Continuous batching in PyTorch: every slot feeds one token a step, at one shared cache column.

The caches are rings over columns. All slots write the same column in a step, so a write is a slice,
and a slot sees the columns of its own last `age` steps. A prompt is fed token by token like an
answer: in a batch this wide a row costs the same either way, and every token's features and logits
come out of the one pass.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "one_query_grouped"


class Ring:
    """Keys and values of a batch, a layer [slots, kv heads, columns, head_dim]."""

    def __init__(self, config: Any, num_slots: int, num_columns: int, like: torch.Tensor) -> None:
        """`like` gives dtype and device."""
        shape = (num_slots, config.num_key_value_heads, num_columns, config.head_dim)
        self.keys = [like.new_zeros(shape) for _ in range(config.num_hidden_layers)]
        self.values = [like.new_zeros(shape) for _ in range(config.num_hidden_layers)]
        self.num_columns = num_columns
        self.column = 0
        self.columns = torch.arange(num_columns, device=like.device)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write this step's column of a layer; the whole ring is what attention reads."""
        self.keys[layer_idx][:, :, self.column] = keys[:, :, 0]
        self.values[layer_idx][:, :, self.column] = values[:, :, 0]
        return self.keys[layer_idx], self.values[layer_idx]

    def mask(self, ages: torch.Tensor) -> torch.Tensor:
        """0 or -inf [slots, 1, 1, columns]: `ages` [slots] is each slot's position in its text."""
        distance = (self.column - self.columns) % self.num_columns
        hidden = distance[None, :] > ages[:, None]
        like = self.keys[0]
        return like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None, None]

    def lay(self, slot: int, prefix: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Put a prefix, per layer two of [kv heads, tokens, head_dim], before the next column."""
        count = prefix[0][0].shape[1]
        at = (self.column - count + self.columns[:count]) % self.num_columns
        for layer, (keys, values) in enumerate(prefix):
            self.keys[layer][slot, :, at] = keys
            self.values[layer][slot, :, at] = values

    def advance(self) -> None:
        """Go to the next column."""
        self.column = (self.column + 1) % self.num_columns

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Unused by the model, which is given positions and mask."""
        return 0


def grouped_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one query a slot: the heads of a group are rows against one key head."""
    slots, heads, _one, width = query.shape
    rows = query.view(slots, key.shape[1], heads // key.shape[1], width)
    scores = (rows @ key.transpose(-1, -2)).float() * scaling + attention_mask.float()
    weights = torch.softmax(scores, dim=-1).to(value.dtype)
    return (weights @ value).view(slots, 1, heads, width), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, grouped_attention)
