"""Reasoning and tool-call parsing by the tags of each family, which cut an output into sections."""
