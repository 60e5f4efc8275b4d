"""specbench: which speculative decoding set-up is faster, by how much, and is the number true."""

__version__ = "0.1.0"
