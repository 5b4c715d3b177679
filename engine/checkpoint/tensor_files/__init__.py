"""The files of a checkpoint, safetensors or GGUF: where each tensor is, and its elements."""
