"""The commands: each registers its options and runs, with one module a command."""
