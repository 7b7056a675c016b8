"""Shared parts of the tests: processes that need not import the stack again, small models and data sets."""
