"""The model repository that Triton loads: config.pbtxt from the tables of tensors, and model.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from dflash_trt import swap
from dflash_trt.errors import ConfigError
from dflash_trt.serve.options import ServeOptions
from dflash_trt.serve.sharing import ALIAS_OF
from dflash_trt.serve.tensors import INPUTS, MAX_BATCH, OUTPUTS, Tensor

MODEL = "ensemble"  # has the engine
ALIAS = "tensorrt_llm_bls"  # the same under its other name
CONFIG = "config.pbtxt"
HEADER = "# Written by dflash_trt/serve/repository.py"  # how a repository of ours is recognised


def model_py() -> str:
    """The source of model.py."""
    source = resources.files("dflash_trt.triton_model_repo") / MODEL / "1" / "model.py"
    return source.read_text()


def config_pbtxt(name: str, parameters: Mapping[str, str]) -> str:
    """A model's config.pbtxt."""
    blocks = [
        f"{HEADER} from dflash_trt/serve/tensors.py.\n"
        f'name: "{name}"\nbackend: "python"\nmax_batch_size: {MAX_BATCH}\n'
        "model_transaction_policy { decoupled: true }\n"
        "instance_group [ { count: 1, kind: KIND_CPU } ]\n",
        *(_tensor("input", tensor, ", optional: true") for tensor in INPUTS),
        *(_tensor("output", tensor) for tensor in OUTPUTS),
        *(
            f"parameters {{ key: {json.dumps(key)}, value: "
            f"{{ string_value: {json.dumps(value, ensure_ascii=False)} }} }}\n"
            for key, value in parameters.items()
        ),
    ]
    return "".join(blocks)


def _tensor(kind: str, tensor: Tensor, more: str = "") -> str:
    dims = ", ".join(map(str, tensor.dims))
    facts = f'name: "{tensor.name}", data_type: TYPE_{tensor.dtype}, dims: [ {dims} ]{more}'
    return f"{kind} {{ {facts} }}\n"


def is_repository(path: Path) -> bool:
    """Whether a folder is one that `write_repository` wrote, with nothing of others in it.

    Triton's examples have a model `ensemble` too, and somebody may have put models beside ours.
    """
    try:
        start = (path / MODEL / CONFIG).read_bytes()[: len(HEADER)]
        return start == HEADER.encode() and {f.name for f in path.iterdir()} <= {MODEL, ALIAS}
    except OSError:
        return False


def write_repository(
    output: Path, options: ServeOptions, environment: Path | None = None, *, force: bool = False
) -> Path:
    """Write a model repository; `environment` is the virtual environment of its Python processes.

    It is whole or not there. Raises `ConfigError` when `output` exists, unless `force` and it is a
    repository of ours or an empty folder, and for a path that is not UTF-8.
    """
    shared = {} if environment is None else {"EXECUTION_ENV_PATH": str(environment)}
    alias = {ALIAS_OF: MODEL, **({"socket": options.socket} if options.socket else {})}
    models = {MODEL: {**options.to_parameters(), **shared}, ALIAS: {**alias, **shared}}
    output = swap.real_path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    swap.clean_up(output, is_repository)
    _refuse_existing(output, force)
    with swap.building(output) as draft:
        repository = draft / "repository"
        for name, parameters in models.items():
            (repository / name / "1").mkdir(parents=True)
            (repository / name / CONFIG).write_bytes(_encoded(name, parameters))
            (repository / name / "1" / "model.py").write_text(model_py())
        _refuse_existing(output, force)
        with swap.set_aside(output):
            repository.rename(output)
    return output


def _refuse_existing(output: Path, force: bool) -> None:
    if not output.exists():
        return
    if not swap.may_replace(output, is_repository):
        raise ConfigError(
            f"{output} exists and is not a model repository of dflash-trt: it is not replaced",
            hint="choose another folder",
        )
    if not force:
        raise ConfigError(f"{output} exists already", hint="--force replaces it")
    if swap.is_held(output):
        raise ConfigError(
            f"{output} is the model repository of a server that runs", hint="choose another folder"
        )


def _encoded(name: str, parameters: Mapping[str, str]) -> bytes:
    for key, value in parameters.items():
        try:
            value.encode()
        except UnicodeEncodeError:  # a path may have any bytes
            raise ConfigError(
                f"{key} is {value!r}, but {CONFIG} holds UTF-8 alone", hint="rename the path"
            ) from None
    return config_pbtxt(name, parameters).encode()
