"""Every error a user can cause, each with one line that says what is wrong and one that helps.

DFlashError
├── ConfigError            a choice is out of range, or choices contradict each other
├── CheckpointError        a checkpoint cannot be read
│   ├── UnsupportedArchitecture
│   ├── MissingTensor
│   ├── BadTensor
│   └── PairMismatch       target and drafter do not belong together
├── GraphError             a net broke a rule of the op surface: a bug of ours
├── BuildError             the engine could not be written
│   └── NoLowering         a backend has no way to express an op
├── PluginError            the KV-injection plugin's library cannot be used
├── EngineDirError         an engine directory cannot be loaded
├── CapacityError          a request does not fit the engine's limits
│   └── QueueFull          it would fit, but too many requests wait already
├── GpuError               CUDA or TensorRT refused a call at run time
│   └── GpuMemoryError     the GPU's memory does not hold the engine, its caches or a step
├── StepError              the session failed while a request ran
├── EngineStopped          the engine takes no more requests: it drains, is closed, or is dead
├── RequestError           a field of a request is out of range
├── MissingPackage         an optional package that was asked for cannot be used
└── TokenizerError         a tokenizer or chat template cannot be read or used
"""

from __future__ import annotations

from typing import ClassVar


class DFlashError(Exception):
    """An error the user can act on: `message` says what and where, `hint` what to do.

    `choice`: the field of a build's choices that is at fault, where it is one.
    """

    HINT: ClassVar[str] = ""  # what helps against most errors of a class
    EXIT_CODE: ClassVar[int] = 2  # of a program that ends with it; 1 where nobody asked wrongly

    def __init__(self, message: str, hint: str = "", *, choice: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.choice = choice
        self.hint = hint or self.HINT


class ConfigError(DFlashError):
    """A choice (flag, recipe field) is out of range."""


class CheckpointError(DFlashError):
    """A checkpoint file or folder cannot be read."""

    HINT = "check the path; a file that is damaged must be fetched or converted again"


class UnsupportedArchitecture(CheckpointError):
    """The checkpoint's model family, or a feature it asks for, is not one we can reproduce."""

    HINT = "README.md lists the models and features that are read"


class MissingTensor(CheckpointError):
    """A tensor that the architecture needs is not in the checkpoint."""

    HINT = "the checkpoint is incomplete: fetch or convert it again"


class BadTensor(CheckpointError):
    """A tensor is there, but its shape, type or bytes are wrong."""

    HINT = "the checkpoint is damaged or of an unknown kind: fetch or convert it again"


class PairMismatch(CheckpointError):
    """Target and drafter disagree about a fact they must share."""

    HINT = "use the drafter that was trained for this target"


class GraphError(DFlashError):
    """A net broke a rule of the op surface. Always a bug of ours, never of the user's files."""

    HINT = "this is a bug of dflash-trt: please report it"
    EXIT_CODE = 1


class BuildError(DFlashError):
    """The engine could not be built or written."""


class NoLowering(BuildError):
    """A backend has neither a lowering nor a decomposition for an op."""

    HINT = "this is a bug of dflash-trt: please report it"
    EXIT_CODE = 1


class PluginError(DFlashError):
    """The KV-injection plugin's library is not there, altered, or refused by TensorRT."""


class EngineDirError(DFlashError):
    """An engine directory is incomplete, altered, or of another version."""

    HINT = "build the engine again"


class CapacityError(DFlashError):
    """A request does not fit the limits that the engine was built with."""


class QueueFull(CapacityError):
    """As many requests wait as the queue holds; the same request may be sent again later."""


class GpuError(DFlashError):
    """CUDA or TensorRT refused a call at run time, or there is no GPU."""

    EXIT_CODE = 1


class GpuMemoryError(GpuError):
    """What has to be in the GPU's memory at once does not fit."""


class StepError(DFlashError):
    """The session failed in a step that this request took part in."""

    HINT = "send the request again; if it fails again, start the engine anew"
    EXIT_CODE = 1


class EngineStopped(DFlashError):
    """The engine takes no more requests: it drains, was closed, or died."""

    HINT = "start the engine again, or send the request to another one"
    EXIT_CODE = 1


class MissingPackage(DFlashError):
    """An optional package that this path needs is not installed, or cannot be loaded."""


class RequestError(DFlashError):
    """A field of a request is out of range."""


class TokenizerError(DFlashError):
    """A tokenizer or chat template cannot be read or used."""
