"""Reward functions for recipes."""
