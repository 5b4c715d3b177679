"""The files of a checkpoint: their paths, its JSON files and the headers of its tensors.

What is made of them, a model and its parameters, is in `engine.models` and `engine.weights`.
"""
