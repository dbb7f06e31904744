"""Models and data as they are named on a command line."""
