"""`llmc run`: load a bundle, stream the answer to one prompt, and say how fast it was."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from ...errors import RequestError, UsageError
from ...runtime import Engine, Output, SamplingParams, load
from ...runtime.prompt import Prompt
from ...runtime.selection import EXECUTORS, ExecutorName
from .output import json_option, note, print_json


@click.command(name="run")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("-p", "--prompt", required=True, help="The prompt; '-' reads it from stdin.")
@click.option("--chat/--raw", "chat", default=None, help="Use the chat template or not [default: if there is one].")
@click.option("-n", "--max-tokens", type=int, default=256, show_default=True, help="Most tokens to generate.")
@click.option("--temperature", type=float, help="0 is greedy [default: the model's own].")
@click.option("--top-k", type=int, help="Choose among the k likeliest tokens; 0 is off [default: the model's own].")
@click.option("--top-p", type=float, help="Choose among the likeliest tokens of this total probability.")
@click.option("--min-p", type=float, help="Leave out tokens less likely than this share of the likeliest.")
@click.option("--seed", type=int, help="The same seed gives the same tokens.")
@click.option("--stop", multiple=True, help="End before this text; may be given several times.")
@click.option("--ignore-eos", is_flag=True, help="Go on past the end of the sequence.")
@click.option("--target", help="Which of the bundle's targets to run [default: the best that runs here].")
@click.option(
    "--executor",
    type=click.Choice(EXECUTORS),
    default="auto",
    show_default=True,
    help="What to run it with; the interpreter runs GPU targets on a CPU, slowly.",
)
@click.option("--num-threads", type=click.IntRange(1, 256), help="CPU threads [default: LLMC_NUM_THREADS, or all].")
@click.option("--stats", is_flag=True, help="Print on stderr what ran it and how fast.")
@json_option
def command(
    bundle: Path,
    prompt: str,
    chat: bool | None,
    max_tokens: int,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
    stop: tuple[str, ...],
    ignore_eos: bool,
    target: str | None,
    executor: ExecutorName,
    num_threads: int | None,
    stats: bool,
    as_json: bool,
) -> None:
    """Generate text with BUNDLE.

    A model with a chat template answers the prompt as the user's message; --raw continues it as plain text instead.
    """
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
    )
    text = _read_prompt(prompt)
    started = time.perf_counter()
    with load(bundle, target=target, executor=executor, num_threads=num_threads, max_num_seqs=1) as engine:
        load_ms = (time.perf_counter() - started) * 1e3
        if chat and not engine.has_chat_template:
            raise UsageError(f"--chat: {bundle} has no chat template; leave out --chat")
        use_chat = engine.has_chat_template if chat is None else chat
        request: Prompt = [{"role": "user", "content": text}] if use_chat else text
        output = engine.generate(request, params) if as_json else _stream(engine, request, params)
        assert isinstance(output, Output)
        if as_json:
            result = {"text": output.text, "token_ids": output.token_ids, "finish_reason": output.finish_reason}
            print_json(
                {
                    **result,
                    "chat": use_chat,
                    "target_choice": engine.target_choice,
                    "device": engine.executor.description,
                    "stats": {**output.stats.to_dict(), "load_ms": load_ms},
                }
            )
        if stats:
            note(engine.target_choice)
            note(_stats_line(output, load_ms, engine.executor.description))


def _read_prompt(prompt: str) -> str:
    if prompt != "-":
        return prompt
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"-p -: stdin is not UTF-8 text: {error}") from None


def _stream(engine: Engine, prompt: Prompt, params: SamplingParams) -> Output:
    """Print the text as it comes, and return the whole output."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 must not end the run
    for chunk in engine.stream(prompt, params):
        if chunk.text:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
        if chunk.output is not None:
            sys.stdout.write("\n")
            return chunk.output
    raise AssertionError("the stream ended without an output")


def _stats_line(output: Output, load_ms: float, device: str) -> str:
    stats = output.stats
    rates = {"prefill": stats.prefill_tokens_per_s, "decode": stats.decode_tokens_per_s}
    parts = [
        f"{stats.prompt_tokens} prompt + {stats.generated_tokens} generated tokens ({output.finish_reason})",
        f"load {load_ms:.0f} ms",
        f"TTFT {stats.ttft_ms:.0f} ms",
        *(f"{name} {rate:.1f} tok/s" for name, rate in rates.items() if rate is not None),
        device,
    ]
    return " | ".join(parts)
