"""Loss scaling, skipped optimizer steps, and activations that overflow float16."""
