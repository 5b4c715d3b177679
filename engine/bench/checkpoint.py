"""Writes a checkpoint folder without weights, for `load_format: dummy`, and its tokenizer.

python -m engine.bench.checkpoint 0.5b FOLDER
"""

from __future__ import annotations

import argparse
import json
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.bench.kernels.shapes import SHAPES, TINY, Shape


def write_checkpoint(shape: Shape, folder: Path) -> None:
    """Write `config.json` and a tokenizer that maps every id of the vocabulary to text."""
    from transformers import PreTrainedTokenizerFast  # takes long

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config, indent=2) + "\n")
    PreTrainedTokenizerFast(tokenizer_object=_tokenizer(shape.vocab)).save_pretrained(str(folder))


def _tokenizer(vocab: int) -> Tokenizer:
    """Return a byte-level tokenizer: the bytes, then four-letter words with a leading space.

    Ids without text would accumulate in the incremental detokenizer.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ("Ġ" + "".join(letters) for letters in product(ascii_lowercase, repeat=4))
    tokens = [*alphabet, *islice(words, vocab - len(alphabet))]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def main() -> None:
    """Entry point of the script."""
    shapes = {shape.label: shape for shape in (*SHAPES, TINY)}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=shapes)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write_checkpoint(shapes[arguments.model], arguments.folder)


if __name__ == "__main__":
    main()
