"""How each kind of tokenizer makes text of its tokens, so that it can be done in parts."""
