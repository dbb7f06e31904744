"""Campaigns: random cases until the time is up. `make torture`."""
