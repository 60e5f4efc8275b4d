"""perf_analyzer on an older C library: where the newer one comes from, and how it is wrapped."""

import subprocess
from pathlib import Path

import pytest

from specbench.errors import LoadError
from specbench.load import perf_analyzer

DEB822 = """\
Types: deb
# a comment
URIs: http://mirror.example/debian http://second.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
"""
OTHER = "deb https://tools.example/apt tools-bookworm main\n"


@pytest.mark.parametrize(
    ("texts", "codename", "source"),
    [
        (
            [OTHER, DEB822],
            "bookworm",
            (
                "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] "
                "http://mirror.example/debian trixie main\n"
            ),
        ),
        (
            ["# deb http://no bookworm main\ndeb http://m.example/debian bookworm main contrib\n"],
            "bookworm",
            "deb http://m.example/debian trixie main\n",
        ),
        (
            ["deb [arch=amd64 signed-by=/k.gpg] http://m.example/ubuntu jammy main\n"],
            "jammy",
            "deb [arch=amd64 signed-by=/k.gpg] http://m.example/ubuntu trixie main\n",
        ),
        (
            ["Types: deb\nURIs: http://m.example/d\nSuites: bookworm\n"],
            "bookworm",
            "deb http://m.example/d trixie main\n",
        ),
        ([OTHER], "bookworm", None),
        ([], "bookworm", None),
    ],
)
def test_the_machines_own_mirror_is_used(
    texts: list[str], codename: str, source: str | None
) -> None:
    assert perf_analyzer.newer_source(texts, codename, "trixie") == source


def fetched(monkeypatch: pytest.MonkeyPatch, cache: Path, text: str) -> None:
    """Have the wheel's binary be a script of *text*."""
    binary = cache / "binary"
    binary.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    monkeypatch.setenv("SPECBENCH_CACHE", str(cache))
    monkeypatch.setattr(perf_analyzer, "fetch_member", lambda *_, **__: binary)


def test_an_older_machine_is_told_the_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(perf_analyzer, "glibc", lambda: (2, 36))
    with pytest.raises(LoadError) as caught:
        perf_analyzer.require()
    said = str(caught.value)
    assert "needs glibc 2.38 or newer; this machine has 2.36" in said
    assert "doctor --fix-perf-analyzer" in said
    assert "load.client=aiperf" in said
    assert "load.client=direct" in said


def test_a_newer_machine_runs_the_binary_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched(monkeypatch, tmp_path, "echo Perf Analyzer Version 0.0.0")
    monkeypatch.setattr(perf_analyzer, "glibc", lambda: (2, 41))
    bin = perf_analyzer.require()
    assert perf_analyzer.find() == bin
    done = subprocess.run([bin / "perf_analyzer"], capture_output=True, text=True, check=True)
    assert "Perf Analyzer" in done.stdout


def test_one_that_does_not_start_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched(monkeypatch, tmp_path, "echo no libssl >&2; exit 127")
    monkeypatch.setattr(perf_analyzer, "glibc", lambda: (2, 41))
    with pytest.raises(LoadError, match="no libssl"):
        perf_analyzer.require()
    assert perf_analyzer.find() is None


def test_the_fix_wraps_the_binary_with_the_newer_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched(monkeypatch, tmp_path, "unused")
    monkeypatch.setattr(perf_analyzer, "glibc", lambda: (2, 36))

    def unpack(into: Path, say: object) -> None:
        libraries = into / "usr" / "lib" / "x86_64-linux-gnu"
        libraries.mkdir(parents=True)
        loader = libraries / "ld-linux-x86-64.so.2"
        loader.write_text('#!/bin/sh\necho Perf Analyzer by "$@"\n', encoding="utf-8")
        loader.chmod(0o755)

    monkeypatch.setattr(perf_analyzer, "_unpack_newer_libraries", unpack)
    bin = perf_analyzer.fix()
    run = [str(bin / "perf_analyzer"), "-m", "two words"]
    said = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    root = tmp_path / "tools" / "perf-analyzer-2.60.0"
    assert f"--library-path {root}/debs/usr/lib/x86_64-linux-gnu" in said
    assert f"{root}/perf_analyzer.real -m two words" in said
    assert perf_analyzer.require() == bin  # from now on it is there


def test_without_apt_or_on_another_system_the_ways_out_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched(monkeypatch, tmp_path, "unused")
    monkeypatch.setattr(perf_analyzer, "glibc", lambda: (2, 34))
    monkeypatch.setattr(perf_analyzer, "os_release", lambda: {"ID": "rhel", "PRETTY_NAME": "RHEL"})
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    with pytest.raises(LoadError, match=r"no recipe for RHEL.*Ways out"):
        perf_analyzer.fix()
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(LoadError, match=r"no apt-get.*Ways out"):
        perf_analyzer.fix()
    assert perf_analyzer.find() is None
