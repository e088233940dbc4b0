"""`dflash-trt verify`: is the engine lossless on these prompts?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer

from dflash_trt.cli.generate import THREADS_OPTION, WIDTH_OPTION, encode_prompt
from dflash_trt.cli.output import JSON_OPTION, print_json, progress_bar
from dflash_trt.decode.engine import Engine
from dflash_trt.decode.request import SamplingParams
from dflash_trt.engine_dir import EngineDir, open_engine
from dflash_trt.errors import BuildError, CapacityError, ConfigError, RequestError
from dflash_trt.lossless.certificate import STORED_AS, Certificate, certify, check_place
from dflash_trt.lossless.prompts import bundled_prompts, interleaved, read_prompts
from dflash_trt.lossless.verify import Report
from dflash_trt.lossless.verify import verify as run_verify

CERTIFICATE_TEMPERATURE = 0.8  # of the sampled runs, unless --temperature says another


def verify(
    engine: Path = typer.Argument(help="Engine directory."),
    prompts: Path | None = typer.Option(
        None, help="Text file, one prompt a line. Default: the bundled prompts."
    ),
    num_prompts: int | None = typer.Option(None, help="Use only so many of them."),
    max_tokens: int = typer.Option(128, help="Tokens to generate for each prompt."),
    temperature: float = typer.Option(0.0, help="0 is greedy; above, seeded sampling."),
    seed: int = typer.Option(0, help="Seed of the sampling."),
    width: int | None = WIDTH_OPTION,
    exact: bool = typer.Option(
        False, "--exact", help="Run plain decoding in the shape of a block, as the control."
    ),
    certificate: Path | None = typer.Option(
        None,
        help="Check greedy and sampled, alone and side by side, and write the report to this "
        f"file ({STORED_AS} in the engine directory is where inspect looks).",
    ),
    threads: int | None = THREADS_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Compare decoding with and without the drafter, token for token. Exit 1 if they differ."""
    if num_prompts is not None and num_prompts < 1:
        raise ConfigError(f"num_prompts is {num_prompts}, at least 1 is needed")
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    texts = _texts(prompts)
    if num_prompts is not None and num_prompts > len(texts):
        raise ConfigError(f"num_prompts is {num_prompts}, there are {len(texts)} prompts")
    if certificate is not None:
        check_place(certificate)
    opened = open_engine(engine)
    loaded = Engine.from_dir(opened, threads)
    ids = _encoded(loaded, texts[:num_prompts], params)
    chosen = loaded.session.limits.block if width is None else width
    if certificate is not None:
        made = _certify(loaded, opened, ids, params, width=chosen, exact=exact)
        failure: BuildError | None = None
        try:  # first: the reader of what is printed may be gone
            made.write(certificate)
        except BuildError as error:
            failure = error
        if as_json:
            print_json(made.to_json())
        else:
            for name, report in made.runs.items():
                typer.echo(f"{name}: ", nl=False)
                _print_report(report)
        if failure is not None:
            raise failure
        if not made.lossless:
            raise typer.Exit(1)
        return
    with progress_bar() as bar:
        task = bar.add_task("prompts", total=len(ids))
        report = run_verify(
            loaded, ids, params, width=chosen, exact=exact,
            on_prompt=lambda report: bar.update(task, completed=report.prompts),
        )  # fmt: skip
    if as_json:
        print_json(report.to_json())
    else:
        _print_report(report)
    if not report.lossless:
        raise typer.Exit(1)


def _texts(file: Path | None) -> list[tuple[str, str]]:
    """The prompts, each with the place that an error about it names."""
    if file is not None:
        return [(f"prompts {file}, line {line}", text) for line, text in read_prompts(file)]
    bundled = interleaved(bundled_prompts())
    return [(f"bundled prompt {i}", text) for i, text in enumerate(bundled)]


def _encoded(
    engine: Engine, texts: list[tuple[str, str]], params: SamplingParams
) -> list[list[int]]:
    """Ids of the prompts; each is checked before the first is run. Raises as a request does."""
    door, ids = engine.scheduler(), []
    for place, text in texts:
        try:
            ids.append(encode_prompt(engine, text, system=None, raw=False))
            door.request(ids[-1], params)
        except (RequestError, CapacityError) as error:
            raise type(error)(f"{place}: {error.message}", error.hint) from error
    return ids


def _certify(
    engine: Engine,
    directory: EngineDir,
    prompts: list[list[int]],
    params: SamplingParams,
    *,
    width: int,
    exact: bool,
) -> Certificate:
    with progress_bar() as bar:
        task = bar.add_task("certificate", total=4)
        return certify(
            engine, directory, prompts, replace(params, temperature=0.0), width=width,
            temperature=params.temperature or CERTIFICATE_TEMPERATURE, exact=exact,
            on_run=lambda name: bar.update(task, description=name, advance=1),
        )  # fmt: skip


def _print_report(report: Report) -> None:
    verdict = "lossless" if report.lossless else "NOT lossless"
    length = report.acceptance_length
    shown = "" if length is None else f", acceptance length {length:.2f}"
    typer.echo(
        f"{verdict}: {report.prompts} prompts, {report.tokens} tokens, "
        f"verify width {report.width}{shown}"
    )
    for miss in report.mismatches:
        margin = "" if miss.logit_margin is None else f", logit margin {miss.logit_margin:.2e}"
        typer.echo(
            f"  prompt {miss.prompt}, token {miss.position}: plain {miss.plain_token}, "
            f"drafted {miss.draft_token}{margin}"
        )
