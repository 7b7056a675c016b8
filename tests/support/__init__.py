"""Shared parts of the tests: processes that start without importing the stack again, small models
and data sets."""
