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
        None, "Workloads by name or group, separated by commas; without any option all are listed."
    )
    concurrency: str = _option("", "Numbers of concurrent streams, one workload for each: 1,16,64.")
    rate: str = _option(
        "", "Arrivals of requests or sessions per second, one workload for each: 0.5,2."
    )
    evenly: bool = _option(
        False, "With --rate: arrivals at equal intervals instead of random ones.", "--evenly"
    )
    trace: Path | None = _option(
        None, "File of requests and their arrival times, in the format of Mooncake's traces."
    )
    requests: int | None = _option(
        None, "Number of requests, or of sessions; default: 4 per stream, or 100.", min=1
    )
    duration: float | None = _option(
        None, "Seconds after which no further request is sent.", min=0.1
    )
    prompt_tokens: str = _option("128", "Prompt tokens: N, LOW-HIGH or lognormal:MEDIAN:SIGMA.")
    max_tokens: str = _option(
        "64", "Output tokens, which each answer gets exactly; in the same forms."
    )
    shared_tokens: int = _option(
        0, "Prompt tokens at the start that are the same for all requests.", min=0
    )
    turns: int = _option(
        1, "Turns per session; each turn repeats the conversation before it.", min=1
    )
    n: int = _option(1, "Output sequences per request.", "--n", min=1)
    temperature: float = _option(0.0, "Sampling temperature; 0: greedy.", min=0.0)
    url: list[str] | None = _option(
        None,
        "Server that is already running: http://HOST:PORT/v1 for OpenAI's API, "
        "http://HOST:PORT/v1/chat for its chats, or grpc://HOST:PORT or http://HOST:PORT/v2 for "
        "Trident. Trident is not started then.",
        metavar="NAME=URL",
    )
    metrics_url: str = _option("", "With --url: address of the server's metrics.")
    model_name: str = _option(
        "", "With --url: model name; default: the first one that the server lists."
    )
    through: str = _option(
        "grpc",
        "Interfaces of Trident to measure, separated by commas: grpc, http, completions, chat, or "
        "engine (in process, without a server).",
    )
    trident: list[str] | None = _option(
        None,
        "Also measure Trident with these settings; separate several settings by spaces.",
        metavar="NAME=SETTING=VALUE",
    )
    peer: list[str] | None = _option(
        None,
        "Command that starts another server to measure: {model} becomes the checkpoint folder, "
        "{port} a free port. Repeatable.",
        metavar="NAME=COMMAND",
    )
    baseline: str = _option(
        "",
        "Also measure transformers, with the batching none (one request at a time), static or "
        "continuous.",
    )
    model: str | None = _option(
        None, "Checkpoint folder, hub id, or demo, in place of a random checkpoint."
    )
    random_model: str = _option(
        "0.4b-tied", "Size of the random checkpoint, one of those of engine.demo.random_checkpoint."
    )
    rounds: int = _option(3, "Measurements per server; the servers take turns.", min=1)
    processes: int = _option(0, "Processes of the load generator; 0: as many as needed.", min=0)
    goodput: str = _option(
        "2,0.2", "Latency bounds for goodput: seconds to the first token, and seconds per token."
    )
    tiny: bool = _option(
        False, "Check the setup quickly, with the bundled model and few tokens.", "--tiny"
    )
    json: Path | None = _option(None, "Write all results to this JSON file.")
    report: Path | None = _option(None, "Write a report to this folder: HTML, PNG plots and JSON.")
