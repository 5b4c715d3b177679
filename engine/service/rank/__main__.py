"""A rank other than 0: `python -m engine.service.rank`, a child of the engine process.

It loads its part of the model and runs the steps that rank 0 sends. It ends with rank 0.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import threading
import time
from collections.abc import Callable

from engine.config.engine_config import EngineConfig
from engine.errors import TridentError
from engine.protocol.channel import Channel
from engine.ranks.wire import (
    ALIVE_INTERVAL_S,
    Alive,
    Failed,
    FromRank,
    Loaded,
    LoadPart,
    Step,
    ToRank,
    decode_step,
)
from engine.service.logs import configure_logging
from engine.service.process.openmp import set_wait
from engine.service.process.serve import configure

log = logging.getLogger("trident.engine")


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="connected socket to rank 0")
    parser.add_argument("--exchange", required=True, help="how ranks exchange")
    parser.add_argument("--memory", type=int, required=True, help="memory that the ranks share")
    parser.add_argument("--rank", type=int, required=True)
    arguments = parser.parse_args()
    configure()
    channel: Channel[FromRank, ToRank] = Channel(socket.socket(fileno=arguments.fd), ToRank)
    status = 0
    try:
        _run(channel, AliveSender(channel), arguments)
    except OSError:  # rank 0 has gone
        pass
    except Exception:
        log.exception("rank %d failed", arguments.rank)
        status = 1
    logging.shutdown()
    os._exit(status)  # without waiting for daemon threads or the teardown of torch


class AliveSender:
    """Sends `Alive` every `ALIVE_INTERVAL_S`, from its own thread; ends the process with rank 0.

    Attributes:
        wait_seconds: returns how long this rank has waited for others.
    """

    def __init__(self, channel: Channel[FromRank, ToRank]) -> None:
        self.wait_seconds: Callable[[], float] = lambda: 0.0
        self._channel = channel
        threading.Thread(target=self._run, name="alive", daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                self._channel.send(Alive(self.wait_seconds()))
                time.sleep(ALIVE_INTERVAL_S)
        except OSError:
            os._exit(0)  # rank 0 has gone


def _run(
    channel: Channel[FromRank, ToRank], alive: AliveSender, arguments: argparse.Namespace
) -> None:
    first = channel.receive()
    if first is None:
        return
    assert isinstance(first, LoadPart)
    try:
        config = EngineConfig.parse(first.config)
        configure_logging(config.log_format)
        set_wait(config)
        # Imported here: torch reads what `set_wait` sets.
        from engine.checkpoint.hub import resolve_checkpoint
        from engine.core.schedule import NO_SAMPLING
        from engine.execution.devices import choose_device
        from engine.execution.loading import load_model
        from engine.models.registry import read_model_spec
        from engine.ranks.exchange import join_ranks

        device = choose_device(config, arguments.rank)
        group = join_ranks(arguments.exchange, arguments.memory, arguments.rank, config, device)
        os.close(arguments.memory)
        alive.wait_seconds = group.wait_seconds
        checkpoint = resolve_checkpoint(config.model, weights=config.reads_weights)
        spec = read_model_spec(checkpoint, config.hf_overrides)
        loaded = load_model(config, checkpoint, spec, list, lambda text: None, group)
    except TridentError as error:
        channel.send(Failed(error.report()))
        return
    except Exception as error:
        log.exception("rank %d could not load its part", arguments.rank)
        text = f"rank {arguments.rank} could not start: {_one_line(error)}"
        channel.send(Failed(TridentError(text).report()))
        return
    channel.send(Loaded(loaded.description, loaded.device))
    runner = loaded.runner
    while (message := channel.receive()) is not None:
        assert isinstance(message, Step)
        try:
            runner.forward(decode_step(message))
            runner.sample(NO_SAMPLING)
        except Exception as error:  # the other ranks wait for this one's part
            channel.send(Failed(TridentError(_one_line(error)).report()))
            raise


def _one_line(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    return text if isinstance(error, TridentError) else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    main()
