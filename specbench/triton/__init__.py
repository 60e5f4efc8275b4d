"""The static half of Triton: a model repository written from a config, and one checked."""
