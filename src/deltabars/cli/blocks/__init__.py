"""Predictions of any number of inputs, written to a folder in blocks, each input exactly once."""
