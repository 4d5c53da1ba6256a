"""`python -m safe_trainers.cli`."""

from .main import run


run()
