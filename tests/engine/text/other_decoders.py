"""Tokenizers other than the two usual kinds."""

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


def few_bytes_tokenizer() -> PreTrainedTokenizerFast:
    """Byte fallback with some bytes only, a token without text, and two spaces lost at the start.

    The token without text ends a run of bytes like any other. One byte is a special token too, and
    the ids have holes.
    """
    words = ["<s>", "", "▁", "▁▁", "▁▁▁", "a", "▁the", "é", _UNFINISHED]
    words += [f"<0x{byte:02X}>" for byte in (*"你é🦊".encode(), 0x41, 0xFF)]
    vocab = {word: i + i // 5 for i, word in enumerate(dict.fromkeys(words))}
    tokenizer = RustTokenizer(models.WordLevel(vocab, "<s>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 2, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("<0xFF>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def panicking_tokenizer() -> PreTrainedTokenizerFast:
    """Words whose decoder panics, in Rust, on a text of a few spaces."""
    words = ["<s>", " ", *"abcdefgh"]
    tokenizer = RustTokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<s>"))
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 40)])
    tokenizer.add_special_tokens([AddedToken("<s>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def word_piece_tokenizer() -> PreTrainedTokenizerFast:
    """Words joined by spaces, `##` for what continues one (BERT)."""
    words = ["[SEP]", "[UNK]", "the", "cat", "##s", "##ing", "é", "你", ",", "n't", _UNFINISHED]
    tokenizer = RustTokenizer(models.WordPiece({word: i for i, word in enumerate(words)}))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken("[SEP]")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
