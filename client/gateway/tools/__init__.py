"""Calls of tools: what models write, as pure functions of the whole text so far."""
