"""Serves a checkpoint with transformers behind OpenAI's `/v1/completions`, to compare with.

python -m client.bench.servers.baseline MODEL --port PORT --batching none|static|continuous

none: one `generate` at a time, as behind a plain web server. static: what waits when the last batch
has ended is a batch, whose answers all come when its longest has ended. continuous: transformers'
own continuous batching, a token at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
)

_LARGEST_BATCH = 64
_CPU_MEMORY = 0.05  # share of free memory for the KV cache of continuous batching
_CPU_TOKENS = 256  # tokens per step of it


class Body(BaseModel):
    """The fields of a request that are used; sampling is by temperature alone."""

    prompt: list[int] | str
    max_tokens: int = 16
    temperature: float = 0.0


@dataclass
class Job:
    """A request; `said` gets lists of new tokens, None at the end, or an error."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    loop: asyncio.AbstractEventLoop
    said: asyncio.Queue[list[int] | Exception | None] = field(default_factory=asyncio.Queue)

    def say(self, *words: list[int] | Exception | None) -> None:
        """Put words into the queue, from any thread."""
        for each in words:
            self.loop.call_soon_threadsafe(self.said.put_nowait, each)


class StaticBatching:
    """Batches of up to `most` of what waits; 1: no batching."""

    def __init__(self, model: Any, most: int) -> None:
        self._model = model
        self._most = most
        self._jobs: queue.Queue[Job] = queue.Queue()
        Thread(target=self._serve, daemon=True).start()

    def submit(self, job: Job) -> None:
        """Take a job; returns at once."""
        self._jobs.put(job)

    def _serve(self) -> None:
        while True:
            batch = [self._jobs.get()]
            while len(batch) < self._most and not self._jobs.empty():
                batch.append(self._jobs.get())
            try:
                for job, tokens in zip(batch, self._generate(batch), strict=True):
                    job.say(tokens, None)
            except Exception as error:
                for job in batch:
                    job.say(error)

    @torch.inference_mode()
    def _generate(self, batch: list[Job]) -> list[list[int]]:
        longest = max(len(job.prompt) for job in batch)
        pads = [longest - len(job.prompt) for job in batch]
        rows = [[0] * pad + job.prompt for pad, job in zip(pads, batch, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in pads]
        most = max(job.max_tokens for job in batch)
        temperature = batch[0].temperature
        sampled = {"do_sample": True, "temperature": temperature, "top_k": 0}
        found = self._model.generate(
            input_ids=torch.tensor(rows, device=self._model.device),
            attention_mask=torch.tensor(mask, device=self._model.device),
            max_new_tokens=most,
            min_new_tokens=most,
            **(sampled if temperature else {"do_sample": False}),
        )
        answers = found[:, longest:].tolist()
        return [tokens[: job.max_tokens] for tokens, job in zip(answers, batch, strict=True)]


class ContinuousBatching:
    """Transformers' own."""

    def __init__(self, model: Any) -> None:
        on_cpu = {"max_memory_percent": _CPU_MEMORY, "max_batch_tokens": _CPU_TOKENS}
        config = ContinuousBatchingConfig(**on_cpu if model.device.type == "cpu" else {})
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=config,
        )
        self._manager.start()
        self._readers = ThreadPoolExecutor(_LARGEST_BATCH * 4)

    def submit(self, job: Job) -> None:
        """Take a job; returns at once."""
        self._readers.submit(self._follow, job)

    def _follow(self, job: Job) -> None:
        try:
            request = self._manager.add_request(
                job.prompt, max_new_tokens=job.max_tokens, streaming=True
            )
            said = 0
            for output in self._manager.request_id_iter(request):
                if output.error:
                    raise RuntimeError(output.error)
                tokens = output.generated_tokens[: job.max_tokens]  # a copy: the list grows
                if len(tokens) > said:  # outputs may overtake each other
                    job.say(tokens[said:])
                    said = len(tokens)
                if said >= job.max_tokens:
                    break
            job.say(None)
        except Exception as error:
            job.say(error)


def application(folder: str, batching: str) -> FastAPI:
    """Return the server of a checkpoint."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    most = {"none": 1, "static": _LARGEST_BATCH}.get(batching)
    answers = StaticBatching(model, most) if most else ContinuousBatching(model)
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": [{"id": folder}]}

    @app.post("/v1/completions")
    async def completions(body: Body) -> StreamingResponse:
        prompt = tokenizer.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
        job = Job(prompt, body.max_tokens, body.temperature, asyncio.get_running_loop())
        answers.submit(job)
        return StreamingResponse(_events(job, tokenizer), media_type="text/event-stream")

    return app


async def _events(job: Job, tokenizer: Any) -> AsyncIterator[str]:
    count = 0
    while (said := await job.said.get()) is not None:
        if isinstance(said, Exception):
            yield f"data: {json.dumps({'error': str(said)})}\n\n"
            return
        count += len(said)
        usage = {"prompt_tokens": len(job.prompt), "completion_tokens": count}
        text = tokenizer.decode(said)
        yield f"data: {json.dumps({'choices': [{'text': text}], 'usage': usage})}\n\n"
    yield "data: [DONE]\n\n"


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--batching", choices=("none", "static", "continuous"), required=True)
    given = parser.parse_args()
    app = application(given.model, given.batching)
    uvicorn.run(app, host="127.0.0.1", port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
