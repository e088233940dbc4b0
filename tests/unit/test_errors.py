"""An error says what helps: of its own, or what helps against most errors of its kind."""

from __future__ import annotations

from dflash_trt.errors import BadTensor, CheckpointError, ConfigError, DFlashError


def test_a_hint_of_its_own_goes_before_that_of_the_kind() -> None:
    assert CheckpointError("a.gguf: no such file").hint == CheckpointError.HINT != ""
    assert BadTensor("w: 3 rows").hint == BadTensor.HINT != CheckpointError.HINT
    assert BadTensor("w: 3 rows", hint="fetch it").hint == "fetch it"
    assert ConfigError("block is 1, allowed are 2 to 64").hint == ""


def test_hints_are_one_line() -> None:
    classes = [DFlashError]
    for kind in classes:
        classes += kind.__subclasses__()
        assert "\n" not in kind.HINT
        assert not kind.HINT.endswith(".")
    assert len(classes) > 15
