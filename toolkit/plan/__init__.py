"""Builds the model of any run without memory, to check that it can be built."""
