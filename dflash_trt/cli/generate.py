"""`dflash-trt generate`: text from an engine."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from dflash_trt.cli.output import JSON_OPTION, messages, print_json
from dflash_trt.decode.engine import Engine, Generation
from dflash_trt.decode.request import Delta, SamplingParams
from dflash_trt.decode.width import AUTO, WidthPolicy, parse_width
from dflash_trt.errors import ConfigError, RequestError
from dflash_trt.text.unicode import check_unicode

_DEFAULTS = SamplingParams()

THREADS_OPTION = typer.Option(None, help="CPU threads. Default: this process's CPU allowance.")
WIDTH_OPTION = typer.Option(
    None, help="Tokens that a step verifies, 1 to the block. Default: the block."
)
AUTO_WIDTH_OPTION = typer.Option(
    AUTO, help="Tokens that a step verifies: 1 to the block, or auto, which measures."
)
MAX_STDIN_BYTES = 4 << 20  # an engine holds at most 2^20 tokens
AUTO_BUDGET_S = 0.5  # to measure steps of one slot, before a text that may be short


def generate(
    engine: Path = typer.Argument(help="Engine directory."),
    prompt: str = typer.Option(..., "--prompt", "-p", help="The prompt; - reads standard input."),
    system: str | None = typer.Option(None, help="System message of the chat."),
    raw: bool = typer.Option(False, "--raw", help="No chat template: continue the text itself."),
    max_tokens: int | None = typer.Option(
        None, help="Tokens to generate at most. Default: what the engine holds."
    ),
    temperature: float = typer.Option(_DEFAULTS.temperature, help="0 is greedy."),
    top_k: int = typer.Option(_DEFAULTS.top_k, help="0 is off."),
    top_p: float = typer.Option(_DEFAULTS.top_p, help="1 is off."),
    min_p: float = typer.Option(_DEFAULTS.min_p, help="0 is off."),
    repetition_penalty: float = typer.Option(
        _DEFAULTS.repetition_penalty, help="For tokens of prompt and output; 1 is off."
    ),
    presence_penalty: float = typer.Option(
        _DEFAULTS.presence_penalty, help="For tokens of the output; 0 is off."
    ),
    frequency_penalty: float = typer.Option(
        _DEFAULTS.frequency_penalty, help="For each time that a token is in the output; 0 is off."
    ),
    bad_word: list[str] = typer.Option([], help="Never write this text; may be repeated."),
    min_tokens: int = typer.Option(_DEFAULTS.min_tokens, help="Do not end before so many."),
    logprobs: int | None = typer.Option(
        None, help="With --json: each token's log-probability, and those of so many others."
    ),
    seed: int | None = typer.Option(
        None, help="Same seed, same text, with or without drafter. Default: a random one."
    ),
    stop: list[str] = typer.Option([], help="End before this text; may be repeated."),
    ignore_eos: bool = typer.Option(False, "--ignore-eos", help="Go on after end-of-sequence."),
    no_draft: bool = typer.Option(
        False, "--no-draft", help="Plain decoding through the same engine."
    ),
    width: str = AUTO_WIDTH_OPTION,
    threads: int | None = THREADS_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Generate text for one prompt."""
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty, bad_words=tuple(bad_word), min_tokens=min_tokens,
        logprobs=logprobs, seed=seed, stop=tuple(stop), ignore_eos=ignore_eos,
    )  # fmt: skip
    num_tokens = parse_width(width)
    if no_draft and num_tokens not in (None, 1):
        raise ConfigError(
            f"--no-draft and --width {width} contradict each other", hint="leave one of them out"
        )
    if logprobs is not None and not as_json:
        raise ConfigError("--logprobs is for --json, which is not given", hint="add --json")
    text = _read_stdin() if prompt == "-" else prompt
    loaded = Engine.load(engine, threads)
    ids = encode_prompt(loaded, text, system=system, raw=raw)

    def show(delta: Delta) -> None:
        typer.echo(delta.text, nl=False)

    chosen: int | WidthPolicy | None = 1 if no_draft else num_tokens
    if chosen is None:
        chosen = loaded.auto_width(1, AUTO_BUDGET_S)
    result = loaded.generate(ids, params, width=chosen, on_delta=None if as_json else show)
    if as_json:
        print_json(result.to_json())
    else:
        typer.echo()
        _print_summary(result)


def _read_stdin() -> str:
    try:
        text = sys.stdin.buffer.read(MAX_STDIN_BYTES + 1)
    except (AttributeError, OSError) as error:
        raise RequestError("standard input is closed", hint="give the prompt with -p") from error
    if len(text) > MAX_STDIN_BYTES:
        raise RequestError(
            f"the prompt on standard input has more than {MAX_STDIN_BYTES} bytes",
            hint="shorten the prompt",
        )
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"standard input is not UTF-8 at byte {error.start}", hint="convert the prompt to UTF-8"
        ) from error


def encode_prompt(engine: Engine, text: str, *, system: str | None, raw: bool) -> list[int]:
    """Ids of a prompt: through the chat template where there is one, unless `raw`.

    Raises `RequestError` for text that is empty or not valid Unicode, or what the template refuses.
    """
    check_unicode("the prompt", text)
    check_unicode("--system", system or "")
    if not text.strip():
        raise RequestError("the prompt is empty", hint="give it some text")
    if raw or not engine.tokenizer.has_chat_template:
        if system is not None:
            raise RequestError(
                "--system needs a chat template, which is not used here",
                hint="leave --system or --raw out" if raw else "leave --system out",
            )
        return engine.tokenizer.encode(text)
    messages_ = [{"role": "system", "content": system}] if system is not None else []
    return engine.tokenizer.encode_chat([*messages_, {"role": "user", "content": text}])


def _print_summary(result: Generation) -> None:
    figures = result.to_json()
    parts = [
        f"{figures['prompt_tokens']} + {figures['completion_tokens']} tokens",
        f"finish {figures['finish_reason']}",
        f"first token {figures['ttft_s']:.2f} s",
    ]
    if figures["decode_tokens_per_s"] is not None:
        parts.append(f"{figures['decode_tokens_per_s']:.1f} tokens/s")
    if figures["acceptance_length"] is not None:
        parts.append(f"acceptance length {figures['acceptance_length']:.2f}")
    if figures["seed"] is not None:
        parts.append(f"seed {figures['seed']}")
    messages.print(" · ".join(parts), soft_wrap=True)
