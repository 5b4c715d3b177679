"""The process of a rank other than 0."""
