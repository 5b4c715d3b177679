"""The options of `trident bench`."""

# ruff: noqa: RUF009  # what `_option` returns is a field

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def _option(default: object, text: str, *names: str, **more: object) -> Any:
    """Return a field that is an option: what `typer.Option` is given beside its default."""
    return field(default=default, metadata={"param_decls": names, "help": text, **more})


@dataclass(frozen=True)
class Options:
    """As they are given."""

    workload: str | None = _option(
        None, "Names or groups, between commas; without options all are listed."
    )
    concurrency: str = _option("", "Numbers of streams, a workload each: 1,16,64.")
    rate: str = _option("", "Requests or sessions per second, a workload each: 0.5,2.")
    evenly: bool = _option(False, "With --rate: equally far apart, not at random.", "--evenly")
    trace: Path | None = _option(None, "A file of requests with their times, in Mooncake's form.")
    requests: int | None = _option(
        None, "Requests, or sessions; default: 4 per stream, or 100.", min=1
    )
    duration: float | None = _option(None, "Seconds after which no request is sent.", min=0.1)
    prompt_tokens: str = _option("128", "Of each prompt: N, LOW-HIGH or lognormal:MEDIAN:SIGMA.")
    max_tokens: str = _option("64", "Of each answer, exactly; the same.")
    shared_tokens: int = _option(0, "Of the prompt, the same for all requests.", min=0)
    turns: int = _option(1, "Of each session; a turn repeats all before it.", min=1)
    n: int = _option(1, "Answers per request.", "--n", min=1)
    temperature: float = _option(0.0, "Of sampling; 0: greedy.", min=0.0)
    url: list[str] | None = _option(
        None,
        "A server that runs: http://HOST:PORT/v1 of OpenAI's API, /v1/chat to ask for "
        "chats, or of Trident grpc://HOST:PORT or http://HOST:PORT/v2. Trident is not started.",
        metavar="NAME=URL",
    )
    metrics_url: str = _option("", "With --url: where the server's metrics are read.")
    model_name: str = _option("", "With --url: its model; default: the first that it lists.")
    through: str = _option(
        "grpc",
        "Ways to Trident, between commas: grpc, http, completions, chat, or engine: in "
        "process, without a server.",
    )
    trident: list[str] | None = _option(
        None,
        "Also measure Trident with other settings; separate several by spaces.",
        metavar="NAME=SETTING=VALUE",
    )
    peer: list[str] | None = _option(
        None,
        "Another server: {model} is the checkpoint's folder, {port} a free port. "
        "May be given several times.",
        metavar="NAME=COMMAND",
    )
    baseline: str = _option(
        "", "Also transformers: none (one at a time), static, continuous batching."
    )
    model: str | None = _option(
        None, "Checkpoint folder, hub id, or demo, instead of a random one."
    )
    random_model: str = _option(
        "0.4b-tied", "The random checkpoint: a size of engine.demo.random_checkpoint."
    )
    rounds: int = _option(3, "Measurements per server, in turns.", min=1)
    processes: int = _option(0, "Of the load generator; 0: as many as it needs.", min=0)
    goodput: str = _option("2,0.2", "Bounds of goodput: seconds to the first token, and per token.")
    tiny: bool = _option(False, "Check the setup, on the bundled model and a few tokens.", "--tiny")
    json: Path | None = _option(None, "Write all figures to this file.")
    report: Path | None = _option(None, "Write a report to this folder: HTML, PNG plots, JSON.")
