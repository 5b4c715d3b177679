"""The text that the demo model is trained on, and the questions that are held out from it."""
