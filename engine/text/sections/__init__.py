"""Which text of an output is content, reasoning or a tool call, by the tags of each family."""
