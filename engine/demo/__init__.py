"""The demo checkpoint: a small model we train ourselves, so that Trident runs without a download.

Importing this package imports no machine-learning library; its modules are scripts and their
parts: ``python -m engine.demo.train`` makes the checkpoint, ``python -m engine.demo.evaluate``
measures one, ``python -m engine.demo.quantization_error`` what int8 makes of it.
"""

from pathlib import Path

CHECKPOINT_DIR: Path = Path(__file__).parent / "checkpoint"
"""The folder of the committed checkpoint, in Hugging Face format."""

__all__ = ["CHECKPOINT_DIR"]
