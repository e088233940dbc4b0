"""Rotary-embedding rules out of `config.json`, in the old and the transformers-5 spelling.

And whether two rules, be they from there or from GGUF, are the same.
"""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import numpy as np

from dflash_trt.checkpoint.facts import Facts, brief
from dflash_trt.config import RopeConfig
from dflash_trt.errors import UnsupportedArchitecture
from dflash_trt.rotary import YARN_DEFAULTS, inverse_frequencies

REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
YARN_NUMBERS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
# Where the reference reads 0 as absent.
ZERO_IS_ABSENT = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
# What the reference takes where nothing is said.
DEFAULTS = {"partial_rotary_factor": 1.0, **YARN_DEFAULTS}
_NOT_PARAMS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
# What a nested object may leave to the top level.
_ALSO_FLAT = ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor")


def read_rope(facts: Facts) -> RopeConfig:
    """The rotary rule. Nested values win over flat ones, with a note where they differ.

    Raises `UnsupportedArchitecture` for a rule that we do not reproduce.
    """
    rules = _rules(facts)
    for place in (facts, rules):
        _refuse_partial(place)
    theta = _theta(facts, rules)
    kind = _kind(rules)
    params: dict[str, Any] = {}
    for key in REQUIRED[kind]:
        if key == "original_max_position_embeddings":
            params[key] = _original_length(facts, rules)
        else:
            params[key] = rules.number(key)
    known = {*REQUIRED[kind], *_NOT_PARAMS}
    if kind == "yarn":
        known |= {*YARN_NUMBERS, "truncate"}
        stated = [key for key in YARN_NUMBERS if rules.has(key)]
        params |= {
            key: rules.number(key)
            for key in stated
            if not (key in ZERO_IS_ABSENT and rules.get(key) == 0)
        }
        if rules.has("truncate"):
            params["truncate"] = rules.flag("truncate", default=True)
    if kind == "llama3" and params["low_freq_factor"] >= params["high_freq_factor"]:
        rules.fail("high_freq_factor", "must be above low_freq_factor")
    for key, value in rules.data.items():
        if key not in known and value is not None:
            rules.note(f"rope key {brief(key)} does not belong to rope type {kind}; it is ignored")
    return RopeConfig(theta, cast(Literal["default", "linear", "llama3", "yarn"], kind), params)


def _rules(facts: Facts) -> Facts:
    """The nested object: `rope_parameters` (transformers 5) or `rope_scaling`."""
    new, old = facts.section("rope_parameters"), facts.section("rope_scaling")
    for nested in (new, old):
        for key, value in nested.data.items():
            if isinstance(value, dict):
                raise UnsupportedArchitecture(
                    f"{facts.path}: rotary rules per layer type ({brief(key)}) are not supported"
                )
    if not (new.data and old.data):
        return new if new.data else old
    # Transformers reads rope_scaling first, others rope_parameters: only agreement is safe.
    for key in dict.fromkeys(("rope_type", *new.data, *old.data)):
        first, second = (_stated(facts, nested, key) for nested in (new, old))
        if key != "type" and _filled(key, first) != _filled(key, second):
            one, other = ("nothing" if v is None else brief(v) for v in (first, second))
            raise facts.error(
                f"rope_parameters and rope_scaling disagree on {brief(key)[1:-1]}: "
                f"{one} and {other}",
                "remove the one that the model was not trained with",
            )
    return new


def _stated(facts: Facts, nested: Facts, key: str) -> Any:
    """What one spelling says of a key, be it under an older name or at top level."""
    if nested.has(key):
        return nested.get(key)
    if key == "rope_type":
        return nested.get("type") or "default"
    return facts.get(key) if key in _ALSO_FLAT else None


def _filled(key: str, value: Any) -> Any:
    """A value as stated, or what its absence means."""
    absent = value is None or (key in ZERO_IS_ABSENT and value == 0)
    return DEFAULTS.get(key) if absent else value


def _refuse_partial(facts: Facts) -> None:
    if facts.has("partial_rotary_factor"):
        factor = facts.number("partial_rotary_factor")
        if factor != 1.0:
            raise UnsupportedArchitecture(
                f"{facts.path}: partial_rotary_factor {factor:g} is not supported, only 1"
            )
    if facts.has("mrope_section"):
        raise UnsupportedArchitecture(
            f"{facts.path}: mrope_section (multimodal rotary positions) is not supported"
        )


def _theta(facts: Facts, rules: Facts) -> float:
    if not rules.has("rope_theta"):
        return facts.number("rope_theta")
    theta = rules.number("rope_theta")
    if facts.has("rope_theta") and facts.number("rope_theta") != theta:
        facts.note(
            f"rope_theta is {brief(facts.get('rope_theta'))} at top level and {theta:g} in "
            "the rope rules; the latter is used"
        )
    return theta


def _kind(rules: Facts) -> str:
    names = {rules.text(key) for key in ("rope_type", "type") if rules.has(key)}
    if len(names) > 1:
        rules.fail("rope_type", f"and type disagree: {' and '.join(sorted(names))}")
    kind = names.pop() if names else "default"
    if not names and rules.has("factor") and kind == "default" and not rules.has("rope_type"):
        rules.fail("rope_type", "is missing, although there is a factor")
    if kind not in REQUIRED:
        raise UnsupportedArchitecture(
            f"{rules.path}: rope type {brief(kind)} is not supported",
            f"supported: {', '.join(REQUIRED)}",
        )
    return kind


def _original_length(facts: Facts, rules: Facts) -> int:
    key = "original_max_position_embeddings"
    if facts.has(key) and rules.has(key) and facts.integer(key) != rules.integer(key):
        facts.fail(key, f"is {facts.get(key)} at top level and {rules.get(key)} in the rope rules")
    return rules.integer(key) if rules.has(key) or not facts.has(key) else facts.integer(key)


def same_rule(one: RopeConfig, other: RopeConfig, head_dim: int) -> bool:
    """Whether two models turn alike, however their files say it. `head_dim`: of both."""
    (ours, scale), (theirs, others) = (inverse_frequencies(r, head_dim) for r in (one, other))
    # GGUF has its numbers in 32 bits.
    return np.allclose(ours, theirs, rtol=1e-5, atol=0) and math.isclose(
        scale, others, rel_tol=1e-5
    )
