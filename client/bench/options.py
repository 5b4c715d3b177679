"""The options of `trident bench`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class Options:
    """As they are given."""

    workload: Annotated[
        str | None,
        typer.Option(help="Names or groups, between commas; without options all are listed."),
    ] = None
    concurrency: Annotated[
        str, typer.Option(help="Numbers of streams, a workload each: 1,16,64.")
    ] = ""
    rate: Annotated[
        str, typer.Option(help="Requests or sessions per second, a workload each: 0.5,2.")
    ] = ""
    evenly: Annotated[
        bool, typer.Option("--evenly", help="With --rate: equally far apart, not at random.")
    ] = False
    trace: Annotated[
        Path | None, typer.Option(help="A file of requests with their times, in Mooncake's form.")
    ] = None
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Requests, or sessions; default: 4 per stream, or 100."),
    ] = None
    duration: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds after which no request is sent.")
    ] = None
    prompt_tokens: Annotated[
        str, typer.Option(help="Of each prompt: N, LOW-HIGH or lognormal:MEDIAN:SIGMA.")
    ] = "128"
    max_tokens: Annotated[str, typer.Option(help="Of each answer, exactly; the same.")] = "64"
    shared_tokens: Annotated[
        int, typer.Option(min=0, help="Of the prompt, the same for all requests.")
    ] = 0
    turns: Annotated[
        int, typer.Option(min=1, help="Of each session; a turn repeats all before it.")
    ] = 1
    n: Annotated[int, typer.Option("--n", min=1, help="Answers per request.")] = 1
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0
    url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=URL",
            help="A server that runs: http://HOST:PORT/v1 of OpenAI's API, /v1/chat to ask for "
            "chats, or of Trident grpc://HOST:PORT or http://HOST:PORT/v2. Trident is not started.",
        ),
    ] = None
    metrics_url: Annotated[
        str, typer.Option(help="With --url: where the server's metrics are read.")
    ] = ""
    model_name: Annotated[
        str, typer.Option(help="With --url: its model; default: the first that it lists.")
    ] = ""
    through: Annotated[
        str,
        typer.Option(
            help="Ways to Trident, between commas: grpc, http, completions, chat, or engine: in "
            "process, without a server."
        ),
    ] = "grpc"
    trident: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SETTING=VALUE",
            help="Also measure Trident with other settings; separate several by spaces.",
        ),
    ] = None
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=COMMAND",
            help="Another server: {model} is the checkpoint's folder, {port} a free port. "
            "May be given several times.",
        ),
    ] = None
    baseline: Annotated[
        str,
        typer.Option(help="Also transformers: none (one at a time), static, continuous batching."),
    ] = ""
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint folder, hub id, or demo, instead of a random one."),
    ] = None
    random_model: Annotated[
        str,
        typer.Option(help="The random checkpoint: a size of engine.demo.random_checkpoint."),
    ] = "0.4b-tied"
    rounds: Annotated[int, typer.Option(min=1, help="Measurements per server, in turns.")] = 3
    processes: Annotated[
        int, typer.Option(min=0, help="Of the load generator; 0: as many as it needs.")
    ] = 0
    goodput: Annotated[
        str, typer.Option(help="Bounds of goodput: seconds to the first token, and per token.")
    ] = "2,0.2"
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Check the setup, on the bundled model and a few tokens.")
    ] = False
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None
    report: Annotated[
        Path | None, typer.Option(help="Write a report to this folder: HTML, PNG plots, JSON.")
    ] = None
