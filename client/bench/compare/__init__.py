"""`trident bench compare`: Trident beside OpenAI-compatible servers, one after the other."""
