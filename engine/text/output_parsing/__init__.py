"""Reasoning and tool-call parsing: the sections of an output, by the tags of each family."""
