"""What is read from vLLM's source is what vLLM itself says."""

import subprocess
import sys

import pytest

from specbench.engines import installation as installations

pytestmark = pytest.mark.engine

PROBE = """
import argparse, dataclasses, typing
from vllm.config.speculative import SpeculativeConfig, SpeculativeMethod
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

def flat(literal):
    for part in typing.get_args(literal):
        yield from flat(part) if typing.get_args(part) else [part]

parser = make_arg_parser(FlexibleArgumentParser())
flags = {a.dest for a in parser._actions if a.option_strings}
print("flags", *sorted(flags))
print("keys", *sorted(f.name for f in dataclasses.fields(SpeculativeConfig)))
print("methods", *sorted(set(flat(SpeculativeMethod))))
"""


def test_names_read_from_the_source_are_those_of_the_running_vllm() -> None:
    installation = installations.find_installation()
    assert installation is not None
    env = {
        **installations.metadata_environment(installation),
        "PATH": "/usr/bin:/bin",
        "HOME": "/tmp",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    said = {line.split()[0]: set(line.split()[1:]) for line in done.stdout.splitlines() if line}
    names = installation.names
    assert names.methods == said["methods"]
    assert names.speculation_keys == said["keys"]
    # Added to the parser by hand, not fields of a class: none is an argument of an engine.
    own = {"model_tag", "help", "config", "headless", "api_server_count", "grpc"}
    missing = {flag for flag in said["flags"] if flag not in names.engine_args} - own
    assert not missing
