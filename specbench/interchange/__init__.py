"""Runs of other tools as run folders, and run folders as their files.

    reading    a file to its JSON values, each with its line; which tool wrote it
    shapes     what the fields of those files may hold
    found      what an importer finds: cases with requests, or with the tool's figures alone
    answers    EAGLE and Spec-Bench answer files, both ways
    vllm_bench, sglang, genai_perf, aiperf     the importers
    importing  what was found to a run folder
    exporting  a case of a run folder to answers, AIPerf records or a GenAI-Perf export

An importer keeps what a file really holds. Acceptance becomes tokens per target step with the bonus
token, k the number of tokens drafted in a chain (docs/runs.md has every formula); the rest is None.
"""
