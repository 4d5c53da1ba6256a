"""Compares two live models on the same inputs."""
def diff_models(a, b, inputs): raise NotImplementedError
