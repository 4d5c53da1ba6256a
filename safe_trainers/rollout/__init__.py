"""Rollouts at the trainer's precision (`generate`, continuous batching, vLLM), and the mismatch that remains."""
