"""What fuzz.py feeds: the kinds of bad input that people really had, and ways to damage good input.

Everything comes from one random.Random, so that a seed and a number give an input again.
"""

import gzip
import io
import json
import random
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "tests" / "data"
DEEP = 3000  # levels; Python's own parsers give up at about 1000
LONG_LINE = 2_000_000
MARK = b"\0\0file:\0\0"

# Values that a field was never meant to have.
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, 10**400, 0.5, -0.0),
    *(1e308, 1e-308, float("inf"), float("-inf"), float("nan"), "", " ", "\0", "\x1b[2J", "\u2028"),
    *("\ud800", "\udfff\ud800", "../../etc/passwd", "/etc/passwd", "a" * 5000, "no", "NaN", "1"),
    *("<script>alert(1)</script>", "{{7*7}}", "%s%n", "é" * 300, "\ufeff", "\r\n", "x\ty"),
    *([], {}, [[]], [None], [0] * 200, {"": None}, {"a": {"b": []}}, [1, "a", None, {}], ["1"]),
]

# Bytes that were found in, before or behind real files.
JUNK: list[bytes] = [
    *(b"\0", b"\xff", b"\xfe\xff", b"\xef\xbb\xbf", b"\r\n", b"\r", b"\n\n", b"\t", b"\x85", b","),
    *(b"\xe2\x80\xa8", b"\xed\xa0\x80", b"\\ud800", b"\\u0000", b'"', b"'", b"{", b"}", b"[", b"]"),
    *(b": ", b"#", b"&a ", b"*a", b"<<: ", b"!!python/object/apply:os.system [id]", b"!!binary ="),
    *(b"no", b"on", b"y", b"~", b".inf", b".nan", b"1e999", b"NaN", b"Infinity", b"-", b"0x1f"),
    *(b"1_000", b"012", b"12:30:45", b"2026-11-30", b"9" * 5000, b"data: ", b"data: [DONE]\n\n"),
    *(
        b"event: x\n",
        b"\x1b[31m",
        b"0\r\n\r\n",
        b"ffffffffffffffff\r\n",
        b"-1\r\n",
        b"<<<<<<< HEAD\n",
    ),
    *(b"---\n", b"...\n", b"%YAML 1.2\n---\n", b"? ", b"|\n", b">-\n", b"{a: b, a: c}", b"@", b"`"),
]


def _zip_bomb() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("run/run.json", b"0" * 20_000_000)
    return made.getvalue()


def nasty() -> list[bytes]:
    """Whole files that everything has to refuse or read, whatever it was expecting."""
    hundred = b"".join(b"a%d: &a%d [*a%d,*a%d]\n" % (n, n, n - 1, n - 1) for n in range(1, 40))
    line = b'{"text": "' + b"x" * LONG_LINE + b'"}\n'
    return [
        *(b"", b"\n", b" ", b"\n" * 10_000, b"\0" * 100, b"\xef\xbb\xbf", b"\xef\xbb\xbf{}\n"),
        *("{}\n".encode("utf-16"), '{"text": "a"}\n'.encode("utf-16-le"), b"\xff\xfe\0\0"),
        *(
            b'{"text": "a"}\r\n{"text": "b"}\r\n',
            b'{"text": "a"},\n{"text": "b"}\n',
            b'["a"]',
            b"[]",
        ),
        *(b'[{"text": "a"}]', b'{"text": "a", "text": "b"}\n', b'{"text": ""}\n', b'{"text": 5}\n'),
        *(b'{"prompt": "hi"}\n', b'{"text": "a", "text_input": "b"}\n', b'{"turns": "x"}\n'),
        *(b'{"turns": []}\n', b'{"text": "\\ud800"}\n', b'{"text": "a\\u2028b"}\n', b"null", b"0"),
        *("{“text”: 1}".encode(), b'{"a":' * DEEP, b"[" * 100_000, b"{" * 100_000, b"- " * DEEP),
        *(b"a: " * DEEP, b"a0: &a0 [x]\n" + hundred, b"a: &a [*a]\n", b"model: no\nprompts: on\n"),
        *(
            b"model: m\nmodel: n\nprompts: p\n",
            b"? [a, b]\n: c\n",
            b"model: !!python/name:os.system\n",
        ),
        *(line, line.rstrip(), b"model: " + b"x" * LONG_LINE, b"data: " + line, b"x" * LONG_LINE),
        *(
            gzip.compress(b'{"text": "a"}\n'),
            gzip.compress(b"x")[:-4],
            b"\x1f\x8b\x08",
            _zip_bomb(),
        ),
        *(b"PK\x03\x04", b"PAR1" + b"\0" * 20 + b"PAR1", b"\x28\xb5\x2f\xfd", b"%PDF-1.7\n"),
        *(b"9" * 10_000, b'{"k": ' + b"9" * 10_000 + b"}", b'{"k": 1e999}', b'{"k": NaN}'),
        *(b"prompt\n" + b'"' * 1001, b"a,b\n1\n", b"a,a\n1,2\n", b'prompt,id\n"x\ny",1\n'),
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n\r\n" + gzip.compress(b"0" * 1_000_000),
        b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000,
    ]


# --- damage --------------------------------------------------------------------------------------


def damaged(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """One of *seeds* with a few things done to it: to its bytes, to its lines or to its JSON.

    What stands before a MARK stays: it says which file of a folder the rest is.
    """
    head, mark, data = split(rng.choice(seeds))
    if rng.random() < 0.5:
        data = _structured(rng, data)
    if rng.random() < 0.5:
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            data = rng.choice(WAYS)(rng, data, split(rng.choice(seeds))[2])
    return head + mark + data


def split(data: bytes) -> tuple[bytes, bytes, bytes]:
    """What stands before a MARK, the mark, and the rest; without one all is the rest."""
    head, mark, rest = data.partition(MARK)
    return (head, mark, rest) if mark else (b"", b"", data)


def _flip(rng: random.Random, data: bytes, _: bytes) -> bytes:
    if not data:
        return b"\0"
    at = rng.randrange(len(data))
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def _insert(rng: random.Random, data: bytes, _: bytes) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + rng.choice(JUNK) + data[at:]


def _cut(rng: random.Random, data: bytes, _: bytes) -> bytes:
    a, b = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
    return data[:a] + data[b:]


def _truncate(rng: random.Random, data: bytes, _: bytes) -> bytes:
    return data[: rng.randint(0, len(data))]


def _repeat(rng: random.Random, data: bytes, _: bytes) -> bytes:
    a = rng.randint(0, len(data))
    b = min(len(data), a + rng.randint(0, 200))
    return data[:b] + data[a:b] * rng.choice((1, 2, 50)) + data[b:]


def _splice(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: rng.randint(0, len(data))] + other[rng.randint(0, len(other)) :]


def _lines(rng: random.Random, data: bytes, other: bytes) -> bytes:
    lines, others = data.split(b"\n"), other.split(b"\n")
    what = rng.randrange(4)
    if what == 0:
        rng.shuffle(lines)
    elif what == 1:
        lines.insert(rng.randint(0, len(lines)), rng.choice(others))
    elif what == 2:
        lines.insert(rng.randint(0, len(lines)), rng.choice(lines))
    else:
        del lines[rng.randrange(len(lines))]
    return b"\n".join(lines)


def _recoded(rng: random.Random, data: bytes, _: bytes) -> bytes:
    text = data.decode("utf-8", "replace")
    if rng.random() < 0.3:
        return data.replace(b"\n", rng.choice((b"\r\n", b"\r", b"\xe2\x80\xa8", b"\0")))
    return text.encode(rng.choice(("utf-16", "utf-16-be", "utf-8-sig", "utf-32")))


def _grown(rng: random.Random, data: bytes, _: bytes) -> bytes:
    if rng.random() > 0.01:  # 2 MB each: seldom, or little else gets done
        return data + data
    at = rng.randint(0, len(data))
    return data[:at] + rng.choice((b"x", b"[", b"- ", b"\n", b"9", b" ")) * LONG_LINE + data[at:]


WAYS: list[Callable[[random.Random, bytes, bytes], bytes]] = [
    *(_flip, _insert, _insert, _cut, _truncate, _repeat, _splice, _lines, _recoded, _grown)
]


def _structured(rng: random.Random, data: bytes) -> bytes:
    """Another value, key or shape somewhere in the JSON that *data* holds, whole or in one line."""
    lines = data.split(b"\n")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        held = [n for n, one in enumerate(lines) if b"{" in one]
        if not held:
            return _pairs(rng, data)
        n = rng.choice(held)
        start = lines[n].index(b"{")
        try:
            value = json.loads(lines[n][start:])
        except (ValueError, RecursionError):
            return _pairs(rng, data)
        made = lines[n][:start] + _dumped(_changed(rng, value))
        return b"\n".join([*lines[:n], made, *lines[n + 1 :]])
    return _dumped(_changed(rng, value)) + b"\n"


def _pairs(rng: random.Random, data: bytes) -> bytes:
    """Another value behind a colon, a blank or an equals sign: YAML, and pages of metrics."""
    lines = data.split(b"\n")
    n = rng.randrange(len(lines))
    for mark in (b": ", b" ", b"="):
        head, found, _ = lines[n].rpartition(mark)
        if found:
            odd = rng.choice(ODD)
            text = odd.encode("utf-8", "surrogatepass") if isinstance(odd, str) else _dumped(odd)
            lines[n] = head + mark + text
            break
    return b"\n".join(lines)


def _dumped(value: Any) -> bytes:  # noqa: ANN401  (any JSON)
    return json.dumps(value).encode()  # NaN and Infinity too, as Python's own json writes them


def _changed(rng: random.Random, value: Any) -> Any:  # noqa: ANN401
    places = list(_places(value))
    if not places:
        return rng.choice(ODD)
    inside, key = rng.choice(places)
    what = rng.randrange(6)
    if what == 0:
        del inside[key]
    elif what == 1 and isinstance(inside, dict):
        inside[str(key) + rng.choice(("s", " ", "\u2028", "_"))] = inside.pop(key)
    elif what == 2 and isinstance(inside[key], list | str) and inside[key]:
        inside[key] = inside[key] * rng.choice((0, 2, 30))
    elif what == 3 and isinstance(inside[key], int | float):
        inside[key] = rng.choice((-inside[key], inside[key] * 10**18, 0, inside[key] + 0.5))
    else:
        inside[key] = rng.choice(ODD)
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401
    pairs: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        pairs = enumerate(value[:50])
    for key, inner in list(pairs):
        yield value, key
        yield from _places(inner)
