"""The engine process, a child of the engine stub: `python -m engine.service.process --fd N`."""
