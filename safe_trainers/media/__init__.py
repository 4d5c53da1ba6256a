"""Casts images and audio to the dtype of the tower that consumes them, before they are moved to the device."""
