"""Load generators: they send prompts to a server and return what happened."""
