"""The files of a checkpoint: where they are, what its JSON files say and its tensors' headers.

What is made of them, a model and its parameters, is in `engine.models` and `engine.weights`.
"""
