"""Datasets of recipes: loading, columns, images."""
