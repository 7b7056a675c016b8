"""One module a group of subcommands; each has ``register(subparsers)``."""
