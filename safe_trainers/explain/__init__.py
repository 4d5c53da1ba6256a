"""Explains error messages and logs."""
