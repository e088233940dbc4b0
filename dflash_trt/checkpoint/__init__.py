"""Build half, first room: target and drafter checkpoints as facts and lazily read weights."""

from dflash_trt.checkpoint.drafter import Drafter, open_drafter, read_drafter_config
from dflash_trt.checkpoint.locate import locate
from dflash_trt.checkpoint.pair import Pair, check_block, check_pair, read_pair
from dflash_trt.checkpoint.target import (
    Target,
    check_tensors,
    load_tokenizer,
    open_target,
    read_target_config,
)
from dflash_trt.checkpoint.tensors import Q4Blocks, TensorInfo, TensorSource
from dflash_trt.checkpoint.variants import unused_keys
from dflash_trt.checkpoint.weights import PairWeights

__all__ = [
    "Drafter",
    "Pair",
    "PairWeights",
    "Q4Blocks",
    "Target",
    "TensorInfo",
    "TensorSource",
    "check_block",
    "check_pair",
    "check_tensors",
    "load_tokenizer",
    "locate",
    "open_drafter",
    "open_target",
    "read_drafter_config",
    "read_pair",
    "read_target_config",
    "unused_keys",
]
