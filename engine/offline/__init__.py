"""The offline API, in the shape of vLLM's: an `EngineCore` in this process, without any server."""
