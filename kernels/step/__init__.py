"""The arrays of a step: slot tables, the inputs prepared from them, and its tokens back."""
