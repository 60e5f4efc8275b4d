"""What of our environment the programs get that specbench calls, and which names hold secrets.

Engines and load generators have a list of their own (engines/process.py): they take CUDA_*, HF_* and
the like. What installs or answers a question takes less.
"""

import os
import re

SECRET = re.compile(r"(?:token|key|secret|password|passwd|credentials?)$", re.IGNORECASE)
WITHHELD = "(withheld)"

# pip and uv: where their index, cache and certificates are (a private index's password is in its
# URL, so they need it); apt: a proxy; nvidia-smi and git: where they are.
INSTALLERS = re.compile(
    r"^(PATH|HOME|USER|LOGNAME|LANG|LC_\w+|TZ|TMPDIR|XDG_\w+|LD_LIBRARY_PATH|PIP_\w+|UV_\w+|NETRC"
    r"|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|\w+_proxy|\w+_PROXY|APT_CONFIG"
    r"|CUDA_VISIBLE_DEVICES|NVIDIA_\w+)$"
)
NAMED = re.compile(
    r"(\w*(?:token|key|secret|password|passwd|credentials?)[\"']?\s*[=:]\s*)[^,}\s]+", re.IGNORECASE
)
IN_A_URL = re.compile(r"(\w+://)[^/@\s]+@")


def for_installers() -> dict[str, str]:
    """The part that pip, uv, apt-get, nvidia-smi and git get."""
    return {name: value for name, value in os.environ.items() if INSTALLERS.match(name)}


def without_secrets(text: str) -> str:
    """*text* (of a command line, say) without values behind names of secrets and user:password@."""
    return IN_A_URL.sub(rf"\1{WITHHELD}@", NAMED.sub(rf"\1{WITHHELD}", text))
