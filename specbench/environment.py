"""What of our environment the programs get that specbench calls, and which names hold secrets.

Engines and load generators have a list of their own (engines/process.py): they take CUDA_*, HF_* and
the like. What installs or answers a question takes less. Which names hold secrets is said here only.
"""

import os
import re

# A name ends in one of these words, or in one and what tells it from another (API_KEY_2, KEY_PROD).
# Where a secret lies, or what kind it is, is none (HF_TOKEN_PATH, stop_token_ids).
_NAME = (
    r"(?:token|key|secret|password|passwd|credentials?)"
    r"(?:\d+|_(?!(?:ids?|path|file|dir|name|type)(?![A-Za-z0-9]))\w+)?"
)
SECRET = re.compile(rf"{_NAME}$", re.IGNORECASE)
WITHHELD = "(withheld)"

# pip and uv: where their index, cache and certificates are (a private index's password is in its
# URL, so they need it); apt: a proxy; nvidia-smi and git: where they are.
INSTALLERS = re.compile(
    r"^(PATH|HOME|USER|LOGNAME|LANG|LC_\w+|TZ|TMPDIR|XDG_\w+|LD_LIBRARY_PATH|PIP_\w+|UV_\w+|NETRC"
    r"|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|\w+_proxy|\w+_PROXY|APT_CONFIG"
    r"|CUDA_VISIBLE_DEVICES|NVIDIA_\w+)$"
)
NAMED = re.compile(rf"(\w*{_NAME}[\"']?\s*[=:]\s*)[^,}}\s]+", re.IGNORECASE)
IN_A_URL = re.compile(r"(\w+://)[^/@\s]+@")


def for_installers() -> dict[str, str]:
    """The part that pip, uv, apt-get, nvidia-smi and git get."""
    return {name: value for name, value in os.environ.items() if INSTALLERS.match(name)}


def without_secrets(text: str) -> str:
    """*text* (of a command line, say) without values behind names of secrets and user:password@."""
    return IN_A_URL.sub(rf"\1{WITHHELD}@", NAMED.sub(rf"\1{WITHHELD}", text))
