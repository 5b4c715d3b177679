"""The demo checkpoint: a small model trained by us, so that Trident runs without a download.

Importing this package imports no machine-learning library. ``tests/demo`` in the source tree
trained the checkpoint and measures what quantisation costs it.
"""

from pathlib import Path

CHECKPOINT_DIR: Path = Path(__file__).parent / "checkpoint"
"""The folder of the committed checkpoint, in Hugging Face format."""

__all__ = ["CHECKPOINT_DIR"]
