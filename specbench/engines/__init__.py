"""Inference servers: how to start one, know that it is ready, read its counters and stop it."""
