"""Recorded experience: the container, collecting it, importing it."""
