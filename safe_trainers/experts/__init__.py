"""Mixtures of experts: what a router chose in a rollout, and in the trainer."""
