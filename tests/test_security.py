"""Nothing let in, nothing let out: shells, secrets, hostile servers, control characters."""

import ast
import functools
import gzip
import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import console
import httpx
import pytest
from console import Done
from rich.console import Console

from specbench.config import Load, Sampling
from specbench.engines import bounded
from specbench.engines.counters import CountersUnreadable
from specbench.engines.process import Child, allowed_environment
from specbench.engines.server import Server
from specbench.environment import SECRET, for_installers, without_secrets
from specbench.load.direct import DirectClient
from specbench.records import Prompt, RequestRecord
from specbench.render.progress import RunProgress
from specbench.store import RunStore
from specbench.sweep import Case

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "specbench").rglob("*.py"))
Made = Callable[..., RunStore]

# --- the source ----------------------------------------------------------------------------------

FORBIDDEN = {
    *("eval", "exec", "os.system", "os.popen", "os.execl", "os.spawnl", "subprocess.getoutput"),
    *("pickle.load", "pickle.loads", "marshal.loads", "shelve.open", "yaml.unsafe_load"),
    *("yaml.full_load", "yaml.load_all", "tempfile.mktemp"),
    *("dill.load", "joblib.load", "pd.read_pickle"),
}


def dotted(node: ast.expr) -> str:
    """What is called, as it is written."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{dotted(value)}.{name}"
    return ""


@functools.cache
def calls(path: Path) -> Sequence[tuple[str, ast.Call]]:
    """Every call in a file by its name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [(dotted(node.func), node) for node in found]


def given(call: ast.Call, name: str) -> object:
    """The literal that a call gives for a keyword; None without one."""
    found = next((one.value for one in call.keywords if one.arg == name), None)
    return found.value if isinstance(found, ast.Constant) else found


def test_no_shell_and_nothing_that_runs_data() -> None:
    for path in SOURCES:
        for name, call in calls(path):
            where = f"{path.name}:{call.lineno}: {name}"
            assert name not in FORBIDDEN, where
            assert given(call, "shell") is None, where
            assert given(call, "trust_remote_code") in (None, False), where
            if name in ("np.load", "numpy.load"):
                assert given(call, "allow_pickle") is False, where
            if name == "torch.load":
                assert given(call, "weights_only") is True, where
            if name == "yaml.load":
                loader = given(call, "Loader")
                assert isinstance(loader, ast.Name), where
                assert loader.id == "_ConfigLoader", where  # a SafeLoader: test_config tries it


# These run our own code in this very interpreter, and add to our environment.
OWN_CODE = {"trio.py", "workers.py"}


def test_children_get_an_environment_that_was_chosen() -> None:
    for path in SOURCES:
        for name, call in calls(path):
            if name in ("subprocess.run", "subprocess.Popen", "Popen", "subprocess.check_output"):
                is_chosen = any(keyword.arg == "env" for keyword in call.keywords)
                inherits = path.name in OWN_CODE
                assert is_chosen or inherits, f"{path.name}:{call.lineno}"


def test_installers_get_what_they_need_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_INDEX_URL", "UV_INDEX_URL", "https_proxy", "SSL_CERT_FILE", "PATH", "HOME"):
        monkeypatch.setenv(name, "kept")
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "BASH_ENV"):
        monkeypatch.setenv(name, "canary")
    found = for_installers()
    assert {"PIP_INDEX_URL", "UV_INDEX_URL", "https_proxy", "SSL_CERT_FILE"} <= set(found)
    assert "canary" not in found.values()
    kept = allowed_environment()
    assert {name for name, value in kept.items() if value == "canary"} == {"HF_TOKEN"}


@pytest.mark.parametrize(
    "text",
    [
        "engine.env.HF_TOKEN=canary",
        "--set=engine.env.MY_API_KEY=canary",
        "engine.env={HF_TOKEN: canary, A: b}",
        'engine.env={"DB_PASSWORD": "canary"}',
        "https://user:canary@index.example/simple",
    ],
)
def test_a_command_line_is_kept_without_secrets(text: str) -> None:
    assert "canary" not in without_secrets(text)
    harmless = "--set sampling.max_tokens=24 tokenizer=x engine.args.max_num_batched_tokens=2048"
    assert without_secrets(harmless) == harmless


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        ("HF_TOKEN", True),
        ("VLLM_API_KEY", True),
        ("API_KEY_2", True),
        ("DB_PASSWORD_PROD", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("MYTOKEN", True),
        ("google_credentials", True),
        ("HF_TOKEN_PATH", False),
        ("TOKENIZERS_PARALLELISM", False),
        ("stop_token_ids", False),
        ("max_tokens", False),
    ],
)
def test_names_of_secrets_are_told_by_one_pattern(name: str, is_secret: bool) -> None:
    assert bool(SECRET.search(name)) is is_secret
    assert ("canary" not in without_secrets(f"--set engine.env.{name}=canary")) is is_secret


def test_there_is_one_pattern_of_secrets_names() -> None:
    """A second one would let through what the first withholds."""
    patterns = [
        (path.name, call.lineno)
        for path in SOURCES
        for name, call in calls(path)
        if name == "re.compile" and re.search(r"(?i)token\|key|password", ast.unparse(call))
    ]
    assert patterns == []  # environment.py's two are made of its _NAME


# --- canaries ------------------------------------------------------------------------------------

CANARY = "canary-7f3a91c4"
TALKATIVE = "talk"  # the engine prints its whole environment, as a debugging one would


def specbench(cwd: Path, *args: str, env: dict[str, str] | None = None) -> Done:
    """The console script in this process, with canaries wherever a user keeps secrets."""
    names = ("HF_TOKEN", "OPENAI_API_KEY", "MY_API_KEY", "AWS_SECRET_ACCESS_KEY")
    canaries = {name: f"{CANARY}-{name}" for name in names}
    return console.specbench(*args, cwd=cwd, env={**canaries, **(env or {})})


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder with two prompts, and an interpreter whose vLLM is the stand-in."""
    package = tmp_path / "site" / "vllm"
    for folder in ("engine", "config"):
        (package / folder).mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "_version.py").write_text("__version__ = '0.32.0'\n", encoding="utf-8")
    fields = "model: str\n    dtype: str\n    trust_remote_code: bool"
    (package / "engine" / "arg_utils.py").write_text(
        f"class EngineArgs:\n    {fields}\n", encoding="utf-8"
    )
    (package / "config" / "speculative.py").write_text(
        "SpeculativeMethod = Literal['eagle']\nclass SpeculativeConfig:\n    method: str\n",
        encoding="utf-8",
    )
    python, site = tmp_path / "python", shlex.quote(f"{tmp_path}/site")
    python.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = -I ] && {{ shift; PYTHONPATH={site} exec {sys.executable} -S "$@"; }}\n'
        f"env >> {shlex.quote(str(tmp_path / 'seen'))}\n"
        f'[ -n "$TALKS" ] && env\n'
        f'exec {sys.executable} {ROOT}/tests/fake_vllm.py "$@"\n',
        encoding="utf-8",
    )
    python.chmod(0o755)
    (tmp_path / "two.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n', encoding="utf-8")
    (tmp_path / "c.yaml").write_text(
        "model: m\nspeculation: {method: eagle, model: h, k: 3}\nprompts: two.jsonl\n"
        f"max_tokens: 24\nengine: {{python: {python}, env: {{TALKS: '1', MY_PASSWORD: {CANARY}}}}}\n"
        "load: {warmup: 1, stall_s: 0.5}\n",
        encoding="utf-8",
    )
    return tmp_path


def leaks(folder: Path, *texts: str) -> list[str]:
    """Where a canary, or the key of an engine, is found."""
    seen = (folder / "seen").read_text(encoding="utf-8")
    keys = re.findall(r"^VLLM_API_KEY=(.+)$", seen, re.MULTILINE)
    assert keys, "no engine was started"
    assert len(set(keys)) == len(keys)
    assert all(len(key) >= 32 for key in keys)
    assert CANARY in seen, "the canary did not even reach the engine"
    words = [word.encode() for word in (CANARY, *keys)]
    found = [f"text {n}" for n, text in enumerate(texts) if any(w in text.encode() for w in words)]
    files = (path for path in (folder / "results").rglob("*") if path.is_file())
    return found + [str(path) for path in files if any(w in path.read_bytes() for w in words)]


@pytest.mark.engine
@pytest.mark.parametrize("mode", ["ok", "exits", "dies"])
def test_no_secret_is_in_anything_that_a_run_leaves(workplace: Path, mode: str) -> None:
    """A good run and failing ones, of an engine that prints its environment into its log."""
    sets = ["--set", f"engine.env.FAKE_MODE={mode}", "--set", f"engine.env.X_TOKEN={CANARY}"]
    done = specbench(workplace, "run", "--config", "c.yaml", "--run-id", "one", *sets)
    assert done.returncode == (0 if mode == "ok" else 3), done.stderr
    texts = [done.stdout, done.stderr]
    for form in ("table", "markdown", "csv", "json", "html"):
        said = specbench(workplace, "report", "--format", form)
        texts += [said.stdout, said.stderr]
    dry = specbench(workplace, "run", "--config", "c.yaml", "--dry-run")
    assert leaks(workplace, *texts, dry.stdout, dry.stderr) == []
    log = next((workplace / "results").rglob("engine.log")).read_text(encoding="utf-8")
    assert "HF_TOKEN=*" in log  # it was printed, and is covered


@pytest.mark.engine
def test_a_resumed_run_takes_its_secrets_from_the_environment_again(workplace: Path) -> None:
    first = ("run", "--config", "c.yaml", "--run-id", "one", "--set", "engine.env.FAKE_MODE=exits")
    assert specbench(workplace, *first).returncode == 3
    document = json.loads((workplace / "results" / "one" / "run.json").read_bytes())
    assert document["withheld"] == ["MY_PASSWORD"]
    done = specbench(workplace, "run", "--resume", "one")
    assert done.returncode == 2
    assert "MY_PASSWORD" in done.stderr
    done = specbench(workplace, "run", "--resume", "one", env={"MY_PASSWORD": f"{CANARY}-2"})
    assert done.returncode == 3  # the engine exits again, but it was started
    assert f"{CANARY}-2" in (workplace / "seen").read_text(encoding="utf-8")
    assert leaks(workplace, done.stdout, done.stderr) == []


@pytest.mark.engine
def test_engines_listen_on_this_machine_alone_and_run_no_code_of_models(workplace: Path) -> None:
    """And where a config asks for remote code, the record says so."""
    asked = ["--set", "engine.args.trust_remote_code=true", "--set", "baseline=false"]
    for run_id, more in (("plain", []), ("asked", asked)):
        done = specbench(workplace, "run", "--config", "c.yaml", "--run-id", run_id, *more)
        assert done.returncode == 0, done.stderr
        for path in (workplace / "results" / run_id).glob("engines/*/engine.json"):
            argv = json.loads(path.read_bytes())["argv"]
            assert argv[argv.index("--host") + 1] == "127.0.0.1"
            assert ("--trust-remote-code" in argv) is bool(more)


def test_the_key_of_a_server_that_is_up_is_kept_nowhere(workplace: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, str(ROOT / "tests" / "fake_vllm.py"), "--port", str(port)]
    server = subprocess.Popen([*command, "--served-model-name", "up"], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        server.stdout.readline()
        (workplace / "u.yaml").write_text(
            "model: m\nprompts: two.jsonl\nmax_tokens: 24\n"
            f"engine: {{url: 'http://127.0.0.1:{port}', api_key_env: MY_API_KEY}}\n",
            encoding="utf-8",
        )
        (workplace / "seen").write_text(f"VLLM_API_KEY={CANARY * 3}\n", encoding="utf-8")
        done = specbench(workplace, "run", "--config", "u.yaml")
        assert done.returncode == 0, done.stderr
        page = specbench(workplace, "report", "--format", "html").stdout
        assert leaks(workplace, done.stdout, done.stderr, page) == []
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (f"engine.args.hf_token={CANARY}", "export HF_TOKEN instead"),
        (f"engine.url=http://me:{CANARY}@127.0.0.1:1", "see engine.api_key_env"),
    ],
)
def test_secrets_where_they_would_be_kept_are_refused(
    workplace: Path, override: str, said: str
) -> None:
    done = specbench(workplace, "run", "--config", "c.yaml", "--set", override)
    assert done.returncode == 2
    assert said in done.stderr
    assert CANARY not in done.stderr


def test_a_log_is_covered_in_place_however_long(tmp_path: Path, monkeypatch: Any) -> None:  # noqa: ANN401
    monkeypatch.setenv("HF_TOKEN", CANARY)
    code = "import os; print(('x' * 70_000 + os.environ['HF_TOKEN']) * 3)"
    log = tmp_path / "log"
    with Child([sys.executable, "-c", code], log=log, cwd=tmp_path) as child:
        while child.poll() is None:
            time.sleep(0.01)
        assert CANARY not in str(child.failed("it failed").tail)
    assert log.read_text(encoding="utf-8") == ("x" * 70_000 + "*" * len(CANARY)) * 3 + "\n"


# --- hostile servers -----------------------------------------------------------------------------


@contextmanager
def hostile(*pieces: bytes, forever: bytes = b"", pause_s: float = 0) -> Iterator[str]:
    """A server that answers anything with *pieces*, and then *forever* again and again."""
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def talk(connection: socket.socket) -> None:
        try:
            connection.recv(65536)
            for piece in pieces:
                connection.sendall(piece)
            while forever and not over.is_set():
                connection.sendall(forever)
                over.wait(pause_s)
            over.wait(5)
        except OSError:
            pass
        finally:
            connection.close()

    def serve() -> None:
        while not over.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=talk, args=(connection,), daemon=True)
            thread.start()
            threads.append(thread)

    threads: list[threading.Thread] = []
    main_thread = threading.Thread(target=serve, daemon=True)
    main_thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in (main_thread, *threads):
            thread.join(5)


OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"
BOMB = gzip.compress(b"\0" * 10_000_000)
HOSTILE: dict[str, tuple[tuple[bytes, ...], bytes, float]] = {
    "endless body": ((OK + b"\r\n",), b"x" * 65536, 0),
    "endless line of chunks": (
        (OK + b"transfer-encoding: chunked\r\n\r\n",),
        b"1\r\nx\r\n" * 999,
        0,
    ),
    "gzip bomb": (
        (OK + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(BOMB), BOMB),
        b"",
        0,
    ),
    "body a byte at a time": ((OK + b"content-length: 99999\r\n\r\n",), b"x", 0.02),
    "head a byte at a time": ((b"HTTP/1.1 200 OK\r\nx: ",), b"x", 0.02),
    "endless head": ((b"HTTP/1.1 200 OK\r\n",), b"x: y\r\n" * 999, 0),
    "redirect": (
        (b"HTTP/1.1 302 Found\r\nlocation: /metrics\r\ncontent-length: 0\r\n\r\n",),
        b"",
        0,
    ),
    "nothing": ((), b"", 0),
    "no HTTP": ((b"SSH-2.0-OpenSSH_9.2\r\n",), b"", 0),
    "deep JSON": ((OK + b"content-length: 200000\r\n\r\n" + b"[" * 200_000,), b"", 0),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_server_cannot_hold_up_or_fill_what_asks_for_counters(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "MOST_BYTES", 1 << 20)
    pieces, forever, pause_s = HOSTILE[kind]
    began = time.monotonic()
    with hostile(*pieces, forever=forever, pause_s=pause_s) as url:
        server = Server(url, "m", "key", timeout_s=0.1)
        with pytest.raises(CountersUnreadable):
            server.counters()
        assert server.models() == []
        assert server.version() is None
        server.healthy()
        server.close()
    assert time.monotonic() - began < 3


def test_bounds_say_which_was_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "MOST_BYTES", 1 << 20)
    found = {}
    for kind in ("endless body", "gzip bomb", "body a byte at a time", "head a byte at a time"):
        pieces, forever, pause_s = HOSTILE[kind]
        with hostile(*pieces, forever=forever, pause_s=pause_s) as url:
            client = httpx.Client(transport=bounded.Bounded(), timeout=0.2, trust_env=False)
            with client, pytest.raises(httpx.HTTPError) as caught:
                client.get(url)
            found[kind] = str(caught.value)
    assert found["endless body"] == "the answer is over 1 MB"
    assert found["gzip bomb"] == "the answer is compressed (gzip)"
    assert "0.2 s" in found["body a byte at a time"] + found["head a byte at a time"]


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_server_cannot_hold_up_or_fill_our_client(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # of 64 MB; one-byte chunks cost h11 80 us each, so that many more of them would take long
    monkeypatch.setattr("specbench.load.http1.MAX_ANSWER_BYTES", 1 << 16)
    pieces, forever, pause_s = HOSTILE[kind]
    found: list[RequestRecord] = []
    began = time.monotonic()
    with hostile(*pieces, forever=forever, pause_s=pause_s) as url:
        client = DirectClient(
            url=url,
            served_model="m",
            api_key=None,
            sampling=Sampling(),
            load=Load(timeout_s=0.5, stall_s=0.25),
        )
        with closing(client):
            prompt = Prompt(id="a", turns=("x",))
            client.send([prompt], max_tokens=4, concurrency=1, on_record=found.append)
    (record,) = found
    assert record.error
    assert len(record.model_dump_json()) < 10_000
    assert time.monotonic() - began < 3


# --- control characters --------------------------------------------------------------------------

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e[/red]<script>alert(1)</script>"


def has_controls(text: str) -> bool:
    return any(not (c.isprintable() or c in "\n\t") for c in text)


def test_model_output_cannot_write_to_the_terminal_nor_run_in_the_page(made_run: Made) -> None:
    prompts = [Prompt(id=f"{n}{EVIL}", turns=(EVIL,), category=EVIL) for n in range(3)]
    store = made_run(prompts, say=lambda *_: f"{EVIL} {EVIL} a b c")
    store.finish_case("eagle-k3.c1", "failed", f"HTTP 500: {EVIL}")
    folder = str(store.path)
    for args in (
        *(("report", folder, "--format", form) for form in ("table", "markdown", "csv", "json")),
        ("report", folder, "--by", "category"),
        ("runs", "list", "--results", str(store.path.parent)),
        ("runs", "show", folder),
        ("what-if", folder, "--tau", "1.5"),
        ("compare", folder, folder),
    ):
        done = specbench(store.path.parent, *args)
        assert "Traceback" not in done.stderr, args
        assert not has_controls(done.stdout + done.stderr), args
    page = specbench(store.path.parent, "report", folder, "--format", "html").stdout
    scripts = re.findall(r"<script.*?</script>", page, re.DOTALL)
    ours = page.replace(max(scripts, key=len), "")  # that one is plotly's own
    assert "owned" in ours
    assert not {"\x1b", "\x07", "\r"} & set(ours)  # a browser shows the others as text
    assert "<script>alert(1)" not in ours


def test_progress_takes_the_control_characters_out(record: Callable[..., RequestRecord]) -> None:
    for terminal in (False, True):
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, color_system=None, width=200)
        case = Case("c", "eagle-k3", "p", 8, 1, 0)
        with RunProgress(3, 0, console) as progress:
            progress.say(f"one\n{EVIL}")
            progress.waiting(EVIL)
            progress.advance(case, record(EVIL, error=f"HTTP 500: {EVIL}"))
        assert not {"\x07", "\x9b", "\u202e", "\x1b]0", "\x1b[2J"} & {
            mark
            for mark in ("\x07", "\x9b", "\u202e", "\x1b]0", "\x1b[2J")
            if mark in out.getvalue()
        }


def test_errors_take_the_control_characters_out(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"model: m\nprompts: p\n{json.dumps(EVIL)}: 1\n", "utf-8")
    (tmp_path / "p.jsonl").write_text(json.dumps({"text": "a", EVIL: 1, "turns": 5}), "utf-8")
    for args in (("run", "--config", "c.yaml"), ("convert", "p.jsonl"), ("report", EVIL)):
        done = specbench(tmp_path, *args)
        assert done.returncode == 2, done.stderr
        assert not has_controls(done.stdout + done.stderr), args


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../up", "/etc/cron.d/x", "a/../../b", "..", "\0", "a\nb", "-rf"])
def test_names_cannot_climb_out_of_their_folders(workplace: Path, name: str) -> None:
    before = sorted(os.listdir(workplace.parent))
    for args in (
        ("run", "--config", "c.yaml", f"--run-id={name}"),
        ("run", "--config", "c.yaml", "--set", f"speculation.name={json.dumps(name)}"),
        ("convert", "two.jsonl", f"--name={name}"),
        ("runs", "delete", "--yes", "--", name),
    ):
        done = specbench(workplace, *args)
        assert done.returncode == 2, (args, done.stderr)
        assert "Traceback" not in done.stderr
    assert sorted(os.listdir(workplace.parent)) == before
    assert not (workplace / "results").exists()
