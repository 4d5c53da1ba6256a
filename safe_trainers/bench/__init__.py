"""Checks of any TRL trainer: a slice of precisions and models, and named faults that raise no error."""
