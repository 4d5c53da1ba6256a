"""Casts at places in a model where two dtypes meet."""
