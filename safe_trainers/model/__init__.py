"""Reads a loaded model: its parts, its dtypes, and whether its forward pass works. Makes no decisions."""
