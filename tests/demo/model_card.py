"""The README.md of a trained demo checkpoint, with measured figures only."""

from __future__ import annotations

from dataclasses import dataclass

from tests.demo.evaluate import Score, overall


@dataclass(frozen=True)
class TrainingRun:
    """A training run: size, length and duration."""

    parameters: int
    vocabulary: int
    steps: int
    tokens: int
    minutes: float
    threads: int
    final_loss: float


def model_card(run: TrainingRun, scores: dict[str, Score]) -> str:
    """The card's Markdown text."""
    rows = "\n".join(
        f"| {category} | {score.asked} | {score.accuracy:.1%} |"
        for category, score in [*scores.items(), ("**all**", overall(scores))]
    )
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# Trident demo model

A Llama-shaped chat model of {run.parameters / 1e6:.2f} million parameters (bfloat16) with a
byte-level BPE vocabulary of {run.vocabulary} tokens. It exists so that Trident can be tried and
tested without a download. It knows what `tests/demo/corpus` teaches and nothing else:
arithmetic with small numbers, counting, spelling, small facts, translations of small words,
emoji, short stories and small talk. Do not rely on it for anything.

## Training

`python -m tests.demo.train --output DIR` made it, on text that the script generates itself:
{run.steps} steps, {run.tokens / 1e6:.1f} million tokens, {run.minutes:.1f} minutes on
{run.threads} CPU threads, final loss {run.final_loss:.3f}.

## Accuracy

On questions that were kept out of training, asked in the chat format and answered greedily in
float32. An answer counts when it is exactly right and comes to an end; a story counts when it
begins as asked, contains the hero and the place asked for, and comes to an end. In arithmetic
the pair of operands is new (for products, the pair in this order); for facts the combination
of fact and wording is new; for counting the range; for spelling the word; for stories the pair of
hero and place, which not every request names in full.

| category | questions | right |
|---|---|---|
{rows}
"""
