"""Checks a machine, and says how to fix what is wrong."""
