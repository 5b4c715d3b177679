"""The settings of Trident, and what values they take."""
