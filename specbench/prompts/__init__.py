"""Prompt sets: the file formats they come in, and where the public ones come from."""
