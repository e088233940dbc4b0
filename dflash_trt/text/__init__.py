"""Text in and out of the engine: tokenizers, chat templates, streaming text, stop rules."""

from dflash_trt.text.detokenize import Detokenizer
from dflash_trt.text.stop import StopChecker, StopResult
from dflash_trt.text.stream import BlockResult, TextStream
from dflash_trt.text.tokenizer import Tokenizer

__all__ = [
    "BlockResult",
    "Detokenizer",
    "StopChecker",
    "StopResult",
    "TextStream",
    "Tokenizer",
]
