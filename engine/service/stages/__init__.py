"""The stages before and after the engine, in the models `tokenizer` and `detokenizer`."""
