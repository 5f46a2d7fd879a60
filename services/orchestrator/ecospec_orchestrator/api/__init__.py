"""HTTP: thin handlers in front of a scheduler."""
