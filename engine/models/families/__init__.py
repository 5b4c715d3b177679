"""One file per family: `parse` makes the spec of a model of its `config.json`."""
