"""Hostile versions of files that a user may receive: nothing in them is unpickled or executed, and no name
leaves its folder. Every hostile item would leave a mark in the file system (``test_payloads.py``)."""
