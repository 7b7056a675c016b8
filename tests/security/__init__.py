"""What a user may be handed, made hostile: nothing in it is unpickled or executed, and no name in it leaves
its folder.

Each test starts from what this project's own tools wrote, changes that, and uses it as a user would. Every
hostile thing would leave a mark in the file system; :mod:`tests.security.test_payloads` shows that it does
when somebody falls for it.
"""
