"""The demo checkpoint: a small model trained by us, so that Trident runs without a download.

Importing this package imports no machine-learning library. Scripts: ``python -m
engine.demo.train`` trains the checkpoint, ``python -m engine.demo.evaluate`` measures one, and
``python -m engine.demo.quantization_error`` measures the loss in accuracy due to a quantisation
while loading, ``python -m engine.demo.format_error`` that due to each format of checkpoints.
"""

from pathlib import Path

CHECKPOINT_DIR: Path = Path(__file__).parent / "checkpoint"
"""The folder of the committed checkpoint, in Hugging Face format."""

__all__ = ["CHECKPOINT_DIR"]
