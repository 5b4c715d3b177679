"""Train the demo checkpoint on generated text.

Run as ``python -m tests.demo.train --output DIR [--steps N]``. It is seeded, runs on a CPU, and
writes a complete Hugging Face folder with a model card of measured figures.

On a machine busy with other work, set ``OMP_WAIT_POLICY=passive`` and ``GOMP_SPINCOUNT=0``:
otherwise threads that spin while waiting for each other waste most of the time.
"""

from __future__ import annotations

import math
import time
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.demo.batches import TOKENS_PER_BATCH, batches
from tests.demo.corpus.documents import documents
from tests.demo.evaluate import measure, show
from tests.demo.model_card import TrainingRun, model_card
from tests.demo.tokenizer import stop_token_ids, train_tokenizer

_VOCABULARY = 1280
_CONTEXT = 2048
_TOKENIZER_DOCUMENTS = 20_000
_HEAD_DIM = 32
_PEAK_RATE = 2e-3
_FINAL_RATE_SHARE = 0.02
_WARM_UP_STEPS = 100
_WEIGHT_DECAY = 0.1
_LARGEST_GRADIENT = 1.0
_STEPS_BETWEEN_LOGS = 50


def build_model(tokenizer: PreTrainedTokenizerFast, hidden_size: int, layers: int) -> Any:
    """A randomly initialised Llama of ``layers`` layers for ``tokenizer``, in float32."""
    heads = hidden_size // _HEAD_DIM
    stops = stop_token_ids(tokenizer)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        head_dim=_HEAD_DIM,
        tie_word_embeddings=True,
        max_position_embeddings=_CONTEXT,
        bos_token_id=None,
        eos_token_id=stops,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=stops, pad_token_id=tokenizer.pad_token_id
    )
    return model


def fit(
    model: Any, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int, console: Console
) -> float:
    """Train ``model`` in place for ``steps`` steps; return the mean loss of the last ones.

    The forward pass runs in bfloat16, which is about twice as fast on recent CPUs.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_PEAK_RATE, betas=(0.9, 0.98), weight_decay=_WEIGHT_DECAY
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    recent: list[float] = []
    columns = (*Progress.get_default_columns()[:3], TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}"), console=console) as bar:
        task = bar.add_task("Training", total=steps, loss=math.nan)
        for step, (ids, labels) in enumerate(islice(batches(tokenizer, seed), steps), start=1):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=labels, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), _LARGEST_GRADIENT)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            recent = [*recent, float(loss.detach())][-_STEPS_BETWEEN_LOGS:]
            mean = sum(recent) / len(recent)
            bar.update(task, advance=1, loss=mean)
            # Print occasionally, so that a log file shows progress too.
            if step % _STEPS_BETWEEN_LOGS == 0 or step == steps:
                console.log(f"step {step}/{steps}: loss {mean:.4f}")
    return mean


def _rate(step: int, steps: int) -> float:
    """The learning rate at ``step`` as a share of its peak: warm-up, then a half cosine."""
    warm = min(1.0, (step + 1) / _WARM_UP_STEPS)
    cosine = (1 + math.cos(math.pi * min(1.0, step / steps))) / 2
    return warm * (_FINAL_RATE_SHARE + (1 - _FINAL_RATE_SHARE) * cosine)


def main(
    output: Annotated[Path, typer.Option(help="Folder to write the checkpoint to.")],
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 2600,
    hidden_size: Annotated[int, typer.Option(min=64, help="Model width.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Model depth.")] = 4,
    questions: Annotated[int, typer.Option(min=1, help="Exam questions per category.")] = 100,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the text.")] = 0,
) -> None:
    """Train, save and examine the demo checkpoint."""
    console = Console()
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    started = time.monotonic()
    with console.status("Learning the tokenizer"):
        sample = islice(documents(seed), _TOKENIZER_DOCUMENTS)
        texts = ("".join(segment.text for segment in document) for document in sample)
        tokenizer = train_tokenizer(texts, _VOCABULARY, _CONTEXT)
    model = build_model(tokenizer, hidden_size, layers)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.log(f"{parameters:,} parameters, {len(tokenizer)} tokens in the vocabulary")
    loss = fit(model, tokenizer, steps, seed, console)
    minutes = (time.monotonic() - started) / 60

    output.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output, save_jinja_files=False)
    console.log(f"trained in {minutes:.1f} minutes, saved to {output}")

    scores = measure(output, questions, console)
    show(scores, console)
    run = TrainingRun(
        parameters, len(tokenizer), steps, steps * TOKENS_PER_BATCH, minutes, threads, loss
    )
    (output / "README.md").write_text(model_card(run, scores), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
