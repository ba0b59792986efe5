"""``treenail once`` for many files, beside two loops that write the same files.

Each run is a process of its own, measured as its user waits for it. The loops get the contents
decoded: one flushes each file and its directory, the other the file system once before its renames.
"""

import base64
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.result import Result

ROOT = Path(__file__).parent.parent
COUNTS = (100, 1_000, 10_000)
TIMES = {100: 5, 1_000: 5, 10_000: 3}
SIZE = 2_000
PER_DIRECTORY = 100
# The slower of the loops would take minutes.
EACH_FLUSHED_LIMIT = 1_000

_PROGRAM = """
import sys, time, resource
begun = time.perf_counter()
code = compile(sys.stdin.read(), "bench", "exec")
exec(code, {"__name__": "bench"})
taken_s = time.perf_counter() - begun
print(taken_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""

_ONCE = """
import contextlib, io
from treenail.cli.main import main
with contextlib.redirect_stdout(io.StringIO()):
    code = main(["once", {config!r}, "--root", {root!r}])
assert code == 0, code
"""

_LOOP = """
import ctypes, os
libc = ctypes.CDLL(None)
begin, each, root = {begin!r}, {each}, {root!r}
renames, directories = [], set()
for number in range({count}):
    directory = f"{{root}}/etc/bench/{{number // {per_directory}}}"
    if directory not in directories:
        os.makedirs(directory, exist_ok=True)
        directories.add(directory)
    path = f"{{directory}}/{{number}}"
    content = f"{{begin}} {{number}} ".encode().ljust({size}, b"x")
    descriptor = os.open(path + ".tmp", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(descriptor, content)
    os.fchmod(descriptor, 0o644)
    if each:
        os.fsync(descriptor)
    os.close(descriptor)
    if each:
        os.rename(path + ".tmp", path)
        descriptor = os.open(directory, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    else:
        renames.append(path)
if not each:
    top = os.open(root, os.O_RDONLY)
    libc.syncfs(top)
    for path in renames:
        os.rename(path + ".tmp", path)
    libc.syncfs(top)
"""


@dataclass(frozen=True, slots=True)
class Taken:
    seconds: float
    peak_mib: float


def measure(_seconds: float) -> Iterator[Result]:
    (ROOT / "build").mkdir(exist_ok=True)
    # Nothing is removed before the end: ext4 searches long for inodes where many were just freed.
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        for count in COUNTS:
            yield from _measured(count, Path(folder))


def _measured(count: int, folder: Path) -> Iterator[Result]:
    """Ours and theirs in turn, so that the disk's moods are everybody's."""
    names = ("first write", "rewrite of all", "no change", "one changed")
    ours: dict[str, list[Taken]] = {name: [] for name in names}
    loops: dict[str, list[Taken]] = {name: [] for name in names[:2]}
    slow: dict[str, list[Taken]] = {name: [] for name in names[:2]}
    config = folder / f"{count}.json"
    for time in range(TIMES[count]):
        root, other, third = (
            _directory(folder / f"{count}-{time}-{name}") for name in ("ours", "once", "each")
        )
        for name, begin, changed in (
            ("first write", "first", -1),
            ("rewrite of all", "second", -1),
            ("no change", "second", -1),
            ("one changed", "second", count // 2),
        ):
            _write(config, count, begin, changed)
            ours[name].append(_run(_ONCE.format(config=str(config), root=str(root))))
            if name in loops:
                loops[name].append(_run(_loop(count, begin, other, each=False)))
                if count <= EACH_FLUSHED_LIMIT:
                    slow[name].append(_run(_loop(count, begin, third, each=True)))
    config_mib = config.stat().st_size / 1024**2
    for name in names:
        label = f"once, {count} files: {name}"
        taken = _seconds_of(ours[name])
        aim = 0.3 if (name, count) == ("no change", 10_000) else None
        yield Result(label, "s", taken, aim)
        if name in loops:
            better = _seconds_of(loops[name])
            yield Result(f"  loop, one flush of the file system: {name}", "s", better)
            if slow[name]:
                each = _seconds_of(slow[name])
                yield Result(f"  loop, each file and directory flushed: {name}", "s", each)
                better = min(better, each)
            yield Result(f"  beside the better loop: {name}", "times", taken / better, 1.3)
        peak = max(found.peak_mib for found in ours[name])
        yield Result(f"  peak memory: {name}", "MiB", peak, 60 + 2 * config_mib)


def _seconds_of(runs: list[Taken]) -> float:
    return median(found.seconds for found in runs)


def _loop(count: int, begin: str, root: Path, *, each: bool) -> str:
    return _LOOP.format(
        begin=begin, each=each, root=str(root), count=count, per_directory=PER_DIRECTORY, size=SIZE
    )


def _run(program: str) -> Taken:
    os.sync()
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input=program,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    seconds, peak = map(float, done.stdout.split())
    return Taken(seconds, peak)


def _directory(path: Path) -> Path:
    path.mkdir()
    return path


def _write(config: Path, count: int, begin: str, changed: int) -> None:
    owner = {"user": {"id": os.geteuid()}, "group": {"id": os.getegid()}}

    def entry(number: int) -> dict[str, object]:
        text = f"{'other' if number == changed else begin} {number} ".encode().ljust(SIZE, b"x")
        source = f"data:;base64,{base64.b64encode(text).decode()}"
        path = f"/etc/bench/{number // PER_DIRECTORY}/{number}"
        return {"path": path, "mode": 0o644, "contents": {"source": source}, **owner}

    files = [entry(number) for number in range(count)]
    config.write_text(json.dumps({"ignition": {"version": "3.5.0"}, "storage": {"files": files}}))
