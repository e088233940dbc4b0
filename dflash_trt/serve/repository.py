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


def model_py() -> str:
    """The source of model.py."""
    source = resources.files("dflash_trt.triton_model_repo") / MODEL / "1" / "model.py"
    return source.read_text()


def config_pbtxt(name: str, parameters: Mapping[str, str]) -> str:
    """A model's config.pbtxt."""
    blocks = [
        f"# Written by dflash_trt/serve/repository.py from dflash_trt/serve/tensors.py.\n"
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


def write_repository(
    output: Path, options: ServeOptions, environment: Path | None = None, *, force: bool = False
) -> Path:
    """Write a model repository; `environment` is the virtual environment of its Python processes.

    It is whole or not there. Raises `ConfigError` when `output` exists, unless `force`.
    """
    if output.exists() and not force:
        raise ConfigError(f"{output} exists already", hint="--force replaces it")
    shared = {} if environment is None else {"EXECUTION_ENV_PATH": str(environment)}
    alias = {ALIAS_OF: MODEL, **({"socket": options.socket} if options.socket else {})}
    output = swap.real_path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    swap.clean_up(output, lambda path: (path / MODEL / CONFIG).is_file())
    with swap.building(output) as draft:
        repository = draft / "repository"
        for name, parameters in ((MODEL, options.to_parameters()), (ALIAS, alias)):
            (repository / name / "1").mkdir(parents=True)
            text = config_pbtxt(name, {**parameters, **shared})
            (repository / name / CONFIG).write_text(text)
            (repository / name / "1" / "model.py").write_text(model_py())
        with swap.set_aside(output):
            repository.rename(output)
    return output
