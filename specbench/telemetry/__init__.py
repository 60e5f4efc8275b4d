"""What the machine did while requests were measured: sampled by a process of its own.

`start` begins it beside a run; `python -m specbench.telemetry` is that process; `gpu` asks NVML,
`host` the kernel. What it writes are the Telemetry… facts of `records`; `analysis.telemetry` makes
numbers of them.
"""
