"""Hostile versions of files that a user may receive: nothing in them is unpickled or executed, no name
leaves its folder.

Each test starts from what this project's own tools wrote, changes it, and uses it as a user would. Every
hostile item would leave a mark in the file system; :mod:`tests.security.test_payloads` shows that it does if
it is executed.
"""
