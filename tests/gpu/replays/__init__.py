"""Ragged steps that are run again from the same state, to the same bits."""
