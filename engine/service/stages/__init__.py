"""Run in the stubs of the models `tokenizer` and `detokenizer`."""
