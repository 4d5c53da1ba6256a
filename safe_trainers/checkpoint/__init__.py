"""Atomic checkpoints that resume exactly."""
