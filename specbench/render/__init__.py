"""Rows to text."""
