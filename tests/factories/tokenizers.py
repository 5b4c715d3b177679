"""Two small tokenizers of the common kinds, built without a download."""

from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

CORPUS = (
    "The quick brown fox jumps over the lazy dog. Stop here, and here again!\n",
    "Où est l'école? Là-bas, près du café: c'est déjà l'été.\n",
    "你好世界。今天天气很好。我们去公园吧。",
    "こんにちは世界。今日はいい天気ですね。",
    "Привет, мир! Как дела? Хорошо.\n",
    "emoji 😀 😃 🎉🎉 👍🏽 👩‍👩‍👧 fin\n",
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'banned' %}{{ raise_exception('No banned role, please') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE as in GPT-2, Llama 3 and Qwen, with few merges, so that characters split.

    Added tokens: three special ones, and plain ones with text outside the byte alphabet.
    """
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(
        [AddedToken(text) for text in ("<tool call>", "日本 ", "é", "\N{REPLACEMENT CHARACTER}")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|end|>",
        chat_template=CHAT_TEMPLATE,
    )


def byte_fallback_tokenizer(*, strip: bool = True) -> PreTrainedTokenizerFast:
    """A SentencePiece-style BPE as in Llama 2: unknown characters become byte tokens.

    `strip`: decoding drops the space that starts a text (Llama 2), or does not (Gemma).
    """
    specials = ["<unk>", "<s>", "</s>"]
    tokens = specials + [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁the", "▁stop", "he", "re", "▁", "▁▁", "é", "你", "好", "\N{REPLACEMENT CHARACTER}"]
    letters = sorted(set("".join(words)) | set("abcdefghijklmnopqrstuvwxyz.,!'STOP"))
    vocab = {
        token: token_id for token_id, token in enumerate(dict.fromkeys(tokens + letters + words))
    }
    merges = [("▁", "▁"), ("h", "e"), ("r", "e"), ("▁", "t")]
    vocab.setdefault("▁t", len(vocab))
    merges += [("▁t", "he")]
    tokenizer = RustTokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
        add_bos_token=True,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """Write the files of a checkpoint's tokenizer into `folder` and return it."""
    tokenizer.save_pretrained(str(folder))
    return folder
