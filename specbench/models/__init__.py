"""Checkpoints made fit for an engine."""
