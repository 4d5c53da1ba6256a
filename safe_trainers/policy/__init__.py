"""Chooses the dtypes of a run from plain values, and configures distributed engines accordingly."""
