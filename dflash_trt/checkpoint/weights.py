"""Both models' tensors under one set of names, with shared tensors resolved to their owner."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

import numpy.typing as npt

from dflash_trt.checkpoint.draft_vocab import ChosenRows, DraftIds
from dflash_trt.checkpoint.finite import check_finite
from dflash_trt.checkpoint.tensors import FloatArray, Q4Blocks, TensorInfo, TensorSource, shown
from dflash_trt.config import PairConfig
from dflash_trt.errors import MissingTensor
from dflash_trt.quantize.floats import FloatCodes, Fp8Weight

Floats = TypeVar("Floats", bound=npt.NDArray[Any])

TARGET, DRAFTER = "target.", "drafter."
EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"


class PairWeights:
    """A `TensorSource` of names `target.NAME` and `drafter.NAME`, NAME without `model.`.

    `target.lm_head.weight`, `drafter.embed_tokens.weight` and `drafter.lm_head.weight` can
    always be asked for: where the tensor is shared they are other names of the owner's. What is
    read is finite: anything else is a `BadTensor`. With `rows`, the tokens of a draft vocabulary,
    the drafter's head is those rows of its own or the target's.
    """

    def __init__(
        self,
        config: PairConfig,
        target: TensorSource,
        drafter: TensorSource,
        rows: DraftIds | None = None,
    ) -> None:
        self._target, self._drafter = target, drafter
        tied = config.target.tie_word_embeddings
        # A tied head that is stored as well is a copy: `check_tied_head` refuses others.
        self._stored = {
            TARGET + name.removeprefix("model."): name
            for name in target.names()
            if not (tied and name == LM_HEAD)
        }
        self._stored |= {DRAFTER + name: name for name in drafter.names()}
        head = TARGET + (EMBEDDING if tied else LM_HEAD)
        self._aliases: dict[str, str] = {}
        if tied:
            self._aliases[TARGET + LM_HEAD] = head
        if not config.drafter.own_embedding:
            self._aliases[DRAFTER + EMBEDDING] = TARGET + EMBEDDING
        if not config.drafter.own_lm_head:
            self._aliases[DRAFTER + LM_HEAD] = head
        self._rows: ChosenRows | None = None
        if rows is not None:
            owner = self._aliases.pop(DRAFTER + LM_HEAD, DRAFTER + LM_HEAD)
            source, stored = self._side(owner), self._stored[owner]
            self._stored[DRAFTER + LM_HEAD] = LM_HEAD
            self._rows = ChosenRows(source, stored, LM_HEAD, rows)

    @property
    def path(self) -> Path:
        """The target's file or folder."""
        return self._target.path

    def names(self) -> list[str]:
        """Canonical names only, the target's first; aliases are not listed."""
        return list(self._stored)

    def canonical(self, name: str) -> str:
        """The name of the tensor that `name` stands for. Raises `MissingTensor`."""
        resolved = self._aliases.get(name, name)
        if resolved not in self._stored:
            raise MissingTensor(f"{self._side(name).path}: tensor {shown(name)} is missing")
        return resolved

    def info(self, name: str) -> TensorInfo:
        """Shape and type of one tensor, under its canonical name."""
        source, stored, resolved = self._find(name)
        return dataclasses.replace(source.info(stored), name=resolved)

    def read(self, name: str) -> FloatArray:
        """The tensor as float32, C-contiguous."""
        source, stored, _ = self._find(name)
        return self._checked(source.read(stored), name)

    def read_rows(self, name: str, start: int, stop: int) -> FloatArray:
        """Rows `start:stop` of the first axis, as float32."""
        source, stored, _ = self._find(name)
        return self._checked(source.read_rows(stored, start, stop), name)

    def raw(self, name: str) -> npt.NDArray[Any]:
        """The tensor in its stored type."""
        source, stored, _ = self._find(name)
        return self._checked(source.raw(stored), name)

    def q4_blocks(self, name: str) -> Q4Blocks | None:
        """The tensor's 4-bit blocks, or None."""
        source, stored, _ = self._find(name)
        blocks = source.q4_blocks(stored)
        if blocks is not None:
            self._checked(blocks.scales, name)
            if blocks.offsets is not None:
                self._checked(blocks.offsets, name)
        return blocks

    def float_codes(self, name: str) -> FloatCodes | None:
        """The tensor's FP8 or NVFP4 codes, or None."""
        source, stored, _ = self._find(name)
        codes = source.float_codes(stored)
        if isinstance(codes, Fp8Weight):  # E2M1 has no code that is not a number
            self._checked(codes.codes, name)
        return codes

    def _checked(self, array: Floats, name: str) -> Floats:
        """The array, if it is finite; else an error with the tensor's name in its file."""
        source, stored, _ = self._find(name)
        info = source.info(stored)
        if source is self._rows:  # which has a name of its own, be they rows of either head
            head = self._target.info(self._stored[self.canonical(TARGET + LM_HEAD)])
            info = head if head.file == info.file else info
        check_finite(array, info)
        return array

    def _find(self, name: str) -> tuple[TensorSource, str, str]:
        resolved = self.canonical(name)
        source = self._side(resolved)
        if resolved == DRAFTER + LM_HEAD and self._rows is not None:
            source = self._rows
        return source, self._stored[resolved], resolved

    def _side(self, name: str) -> TensorSource:
        return self._drafter if name.startswith(DRAFTER) else self._target
