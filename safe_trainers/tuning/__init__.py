"""Finds the precision, and the smallest set of modules in float32, that holds the mismatch of sampler and trainer."""
