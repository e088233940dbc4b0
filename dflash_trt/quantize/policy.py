"""Which weights a precision stores in which form, and how many bytes that takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dflash_trt.errors import ConfigError
from dflash_trt.flavor import PRECISION_TABLE
from dflash_trt.quantize.blocks import BLOCK_SIZE
from dflash_trt.quantize.floats import FP4_BLOCK

FC, HEAD, EMBEDDING = "drafter.fc.weight", "lm_head.weight", "embed_tokens.weight"
# DFlash 2's own tensors: kernels of convolutions, and what scores pairs of tokens.
CONVOLUTION, SELECTOR, BASE_KERNEL = "_conv.", "candidate_selector.", ".base_kernel"


def bits_of(precision: str) -> Callable[[str], int | None]:
    """For a weight's canonical name: 4 or 8 bits, or None for float32.

    int4: layers in 4 bits; the head in 8, since its errors go straight into the choice of a
    token; the drafter's fc stays float32, for its inputs are raw features with outliers past 2e4.
    Nor is anything of DFlash 2's own quantized: a convolution's kernel multiplies a whole layer's
    input or output, the selector's scores choose tokens, and all of it is a few percent of a layer,
    or a table of which a step reads some rows.
    """
    if precision == "fp32":
        return lambda name: None
    if precision == "int4":
        return _int4
    raise ConfigError(f"precision {precision!r} has no weight policy")


def format_of(precision: str) -> Callable[[str], str | None]:
    """For a weight's canonical name: "fp8" or "nvfp4", or None where it is not quantized.

    nvfp4: the head in FP8, and fc and what is DFlash 2's own not at all, for the same reasons as
    in int4.
    """
    if precision in ("bf16", "fp16"):
        return lambda name: None
    if precision in ("fp8", "nvfp4"):
        head = {8: "fp8", 4: precision}
        return lambda name: head.get(_int4(name) or 0)
    raise ConfigError(f"precision {precision!r} has no weight policy")


def kept_format(asked: str | None, kept_as: str | None) -> str | None:
    """The format of a weight for which `format_of` has `asked`.

    `kept_as` is its checkpoint's own word (`TensorInfo`): who quantized it has measured what that
    costs, so what was left alone stays in the compute type, and FP8 is not made NVFP4.
    """
    if asked is None or kept_as is None:
        return asked
    return None if kept_as == "dense" else kept_as


def stored_bytes(
    precision: str,
    name: str,
    shape: Sequence[int],
    kept_as: str | None = None,
    *,
    is_head: bool = False,
) -> int:
    """Bytes of a tensor in an engine; a table that is also a head is there in both forms.

    `kept_as`: see `kept_format`.
    """
    size, compute = math.prod(shape), PRECISION_TABLE[precision].compute_bytes
    if name == FC or len(shape) == 1 or name.endswith(BASE_KERNEL):
        return 4 * size  # float32 on every backend
    if name.endswith(EMBEDDING) and not is_head:
        return compute * size  # rows of it are looked up as they are
    if compute == 4:
        packed = _cpu_bytes(precision, name, shape)
    else:
        packed = _gpu_bytes(kept_format(format_of(precision)(name), kept_as), shape)
    if packed is None:
        return compute * size
    return math.ceil(packed) + (compute * size if name.endswith(EMBEDDING) else 0)


def _cpu_bytes(precision: str, name: str, shape: Sequence[int]) -> float | None:
    bits = bits_of(precision)(name)
    if bits is None or shape[1] % BLOCK_SIZE:
        return None
    # Codes, a float32 scale per block, and for Q4_1 a float32 offset.
    return math.prod(shape) * (bits / 8 + 2 * 4 / BLOCK_SIZE)


def _gpu_bytes(kind: str | None, shape: Sequence[int]) -> float | None:
    if kind is None or shape[1] % FP4_BLOCK:
        return None
    return math.prod(shape) * (1 if kind == "fp8" else 1 / 2 + 1 / FP4_BLOCK)


def _int4(name: str) -> int | None:
    if name == FC or CONVOLUTION in name or SELECTOR in name:
        return None
    return 8 if name.endswith((HEAD, EMBEDDING)) else 4
