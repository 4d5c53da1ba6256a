"""Checks whether a machine and its environment can train."""
