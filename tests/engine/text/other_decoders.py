"""Tokenizers whose decoders are neither byte-level nor byte-fallback."""

from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Words that carry their space as ▁, which the first of a text loses (T5)."""
    words = ["<s>", "▁", "▁▁", "▁the", "cat", "s", "▁é", "你", "▁b▁c", "", _UNFINISHED]
    tokenizer = RustTokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<s>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("<s>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def word_piece_tokenizer() -> PreTrainedTokenizerFast:
    """Words joined by spaces, `##` for what continues one (BERT)."""
    words = ["[SEP]", "[UNK]", "the", "cat", "##s", "##ing", "é", "你", ",", "n't", _UNFINISHED]
    tokenizer = RustTokenizer(models.WordPiece({word: i for i, word in enumerate(words)}))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken("[SEP]")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
