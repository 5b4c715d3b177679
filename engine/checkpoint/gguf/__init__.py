"""Checkpoints in the format of llama.cpp (GGUF): one file that holds all that a folder does.

`folder.py` writes what else Trident reads of a checkpoint (`config.json`, the tokenizer's files)
into a folder of the cache, beside a link to the file, whose weights are read where they are.
"""
