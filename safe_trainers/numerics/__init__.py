"""Loss scaling, skipped optimizer steps, numbers that are not finite, and what float16 cannot hold."""
