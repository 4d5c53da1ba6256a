"""Casts of weights: trainable parameters, quantised layers, modules in float32, and merged adapters."""
