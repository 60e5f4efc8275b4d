"""Where the stages of a run are measured: here (run.py), or spread over a cluster's hosts (ray)."""
