"""Benchmark of ``treenail once`` for many files, compared with two loops that write the same files.

Each run is a new process. The benchmark measures the whole run and, separately, its writes without
reading the config and inspecting the machine. The loops decode and write the same files with the
same modes. One fsyncs each file and its directory. The other calls syncfs before its renames. They
cannot roll back.

The modules of the command are compiled before, as in an installed package. Python starts without
``site``, which reads the other packages of this machine.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import median
from time import perf_counter

from bench.interpreter import BYTECODE
from bench.result import Result

ROOT = Path(__file__).parent.parent
COUNTS = (100, 1_000, 10_000)
TIMES = {100: 7, 1_000: 7, 10_000: 5}
SIZE = 2_000
PER_DIRECTORY = 100
# The slower loop would take minutes for more files.
EACH_FLUSHED_LIMIT = 1_000

PARTS = {
    "flushes": "flushing the file system",
    "undo": "recording what a rollback needs",
    "check": "reading back what was written",
}

_whole_s = attrgetter("whole_s")
_writing_s = attrgetter("writing_s")
_processor_s = attrgetter("processor_s")

_PROGRAM = """
import sys, time
found = {"__name__": "bench"}
exec(compile(sys.stdin.read(), "bench", "exec"), found)
# Not ru_maxrss, which starts with the value of the parent.
peak = [line for line in open("/proc/self/status") if line.startswith("VmHWM")][0].split()[1]
parts = ",".join(f"{name}={spent_s}" for name, spent_s in found["parts"].items())
print(found["writing_s"], time.process_time(), int(peak) / 1024, parts)
"""

_ONCE = """
import contextlib, io, time
begun = time.perf_counter()
from treenail.memory import load_modules
with load_modules():
    import treenail.daemon.configuration.node_configuration as configuration
    from treenail.cli.node.main import main
    from treenail.host.filesystem.disk import Disk
    from treenail.host.rollback.transaction import UndoTransaction
writing_s = 0.0
parts = {{"imports": time.perf_counter() - begun, "flushes": 0.0, "undo": 0.0, "check": 0.0}}
apply = configuration.apply_steps
def count(name, call):
    def counted(*arguments, **others):
        before, begun = parts["flushes"], time.perf_counter()
        try:
            return call(*arguments, **others)
        finally:
            # A flush inside of another part counts as a flush alone.
            inner = parts["flushes"] - before if name != "flushes" else 0.0
            parts[name] += time.perf_counter() - begun - inner
    return counted
def timed(*arguments, **others):
    global writing_s
    begun = time.perf_counter()
    apply(*arguments, **dict(others, verify=count("check", others["verify"])))
    writing_s = time.perf_counter() - begun
configuration.apply_steps = timed
Disk.syncfs = count("flushes", Disk.syncfs)
UndoTransaction._record_changes = count("undo", UndoTransaction._record_changes)
with contextlib.redirect_stdout(io.StringIO()):
    code = main(["once", {config!r}, "--root", {root!r}])
assert code == 0, code
"""

_LOOP = """
import binascii, ctypes, json, os, time
libc = ctypes.CDLL(None)
each, root = {each}, {root!r}
with open({config!r}, "rb") as file:
    entries = json.load(file)["storage"]["files"]
begun = time.perf_counter()
parts = {{"flushes": 0.0}}
def flush(call, *arguments):
    begun = time.perf_counter()
    call(*arguments)
    parts["flushes"] += time.perf_counter() - begun
renames, directories = [], set()
for entry in entries:
    path = root + entry["path"]
    directory = os.path.dirname(path)
    if directory not in directories:
        os.makedirs(directory, exist_ok=True)
        directories.add(directory)
    content = binascii.a2b_base64(entry["contents"]["source"].partition(",")[2])
    descriptor = os.open(path + ".tmp", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(descriptor, content)
    os.fchmod(descriptor, entry["mode"])
    if each:
        flush(os.fsync, descriptor)
    os.close(descriptor)
    if each:
        os.rename(path + ".tmp", path)
        descriptor = os.open(directory, os.O_RDONLY)
        flush(os.fsync, descriptor)
        os.close(descriptor)
    else:
        renames.append(path)
if not each:
    top = os.open(root, os.O_RDONLY)
    flush(libc.syncfs, top)
    for path in renames:
        os.rename(path + ".tmp", path)
    flush(libc.syncfs, top)
writing_s = time.perf_counter() - begun
"""


@dataclass(frozen=True, slots=True)
class RunCost:
    whole_s: float
    writing_s: float
    processor_s: float
    """Processor time of the whole run. Other load hardly changes it."""
    peak_mib: float
    parts: Mapping[str, float]
    """Seconds by part: the imports, and what `PARTS` names of the writing."""


def measure(_seconds: float) -> Iterator[Result]:
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        for count in COUNTS:
            yield from _measure_count(count, Path(folder))


def _measure_count(count: int, folder: Path) -> Iterator[Result]:
    names = ("first write", "rewrite of all", "no change", "one changed")
    ours: dict[str, list[RunCost]] = {name: [] for name in names}
    loops: dict[str, list[RunCost]] = {name: [] for name in names[:2]}
    slow: dict[str, list[RunCost]] = {name: [] for name in names[:2]}
    config = folder / f"{count}.json"
    for time in range(TIMES[count]):
        with _mount_file_system(folder / f"{count}-{time}") as top:
            root, other, third = (_make_directory(top / name) for name in ("ours", "once", "each"))
            for name, begin, changed in (
                ("first write", "first", -1),
                ("rewrite of all", "second", -1),
                ("no change", "second", -1),
                ("one changed", "second", count // 2),
            ):
                write_config(config, count, begin, changed)
                if name in slow and count <= EACH_FLUSHED_LIMIT:
                    slow[name].append(_run(_build_loop(config, third, each=True)))
                pair = [(ours[name], _ONCE.format(config=str(config), root=str(root)))]
                if name in loops:
                    pair.append((loops[name], _build_loop(config, other, each=False)))
                # Alternate the order, so that changes of the disk's speed affect both alike.
                for runs, program in pair if time % 2 else reversed(pair):
                    runs.append(_run(program))
    config_mib = config.stat().st_size / 1024**2
    for name in names:
        yield from _build_results(count, name, ours[name], loops.get(name, []), slow.get(name, []))
        peak = max(found.peak_mib for found in ours[name])
        yield Result(f"  peak memory: {name}", "MiB", peak, 60 + 2 * config_mib)


def _build_results(
    count: int, name: str, ours: list[RunCost], loop: list[RunCost], slow: list[RunCost]
) -> Iterator[Result]:
    aim = 0.3 if (name, count) == ("no change", 10_000) else None
    yield Result(f"once, {count} files: {name}", "s", _compute_median(ours, _whole_s), aim)
    yield Result(f"  its processor time: {name}", "s", _compute_median(ours, _processor_s))
    if not loop:
        return
    yield Result(f"  its imports: {name}", "s", _compute_median(ours, _find_part("imports")))
    yield Result(f"  its writing alone: {name}", "s", _compute_median(ours, _writing_s))
    for part, title in PARTS.items():
        spent_s = _compute_median(ours, _find_part(part))
        yield Result(f"    of that {title}: {name}", "s", spent_s)
    for title, runs in (
        ("one syncfs", loop),
        ("fsync of each file and directory", slow),
    ):
        if runs:
            yield Result(f"  loop, {title}: {name}", "s", _compute_median(runs, _whole_s))
            yield Result(
                f"    its processor time: {name}", "s", _compute_median(runs, _processor_s)
            )
            yield Result(f"    its writing alone: {name}", "s", _compute_median(runs, _writing_s))
            spent_s = _compute_median(runs, _find_part("flushes"))
            yield Result(f"      of that {PARTS['flushes']}: {name}", "s", spent_s)
    # The whole command has the start of Python in it, which many files outweigh.
    limit = 2.0 if count == 1_000 else None
    for title, of, most in (
        ("compared with", _whole_s, limit),
        ("writing, compared with", _writing_s, 1.3),
    ):
        better = min(
            (runs for runs in (loop, slow) if runs), key=lambda runs: _compute_median(runs, of)
        )
        ratio = median(of(one) / of(other) for one, other in zip(ours, better, strict=True))
        yield Result(f"  {title} the better loop, {count} files: {name}", "times", ratio, most)


def _compute_median(runs: list[RunCost], of: Callable[[RunCost], float]) -> float:
    return median(map(of, runs))


def _build_loop(config: Path, root: Path, *, each: bool) -> str:
    return _LOOP.format(config=str(config), root=str(root), each=each)


def _run(program: str) -> RunCost:
    os.sync()
    begun = perf_counter()
    done = subprocess.run(
        [sys.executable, "-S", "-c", _PROGRAM],
        env={"PYTHONPATH": str(ROOT / "agent"), "PYTHONPYCACHEPREFIX": BYTECODE},
        input=program,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    whole_s = perf_counter() - begun
    writing, processor, peak, parts = done.stdout.split()
    spent = (part.split("=") for part in parts.split(","))
    found = {name: float(seconds) for name, seconds in spent}
    return RunCost(whole_s, float(writing), float(processor), float(peak), found)


def _find_part(name: str) -> Callable[[RunCost], float]:
    return lambda run: run.parts[name]


@contextmanager
def _mount_file_system(place: Path) -> Iterator[Path]:
    """Mount an empty ext4 with a journal if possible; otherwise use a directory.

    Without a journal, ext4 searches long for inodes if many were freed in the last five minutes.
    """
    _make_directory(place)
    image = place.with_suffix(".img")
    if not _try_mount(image, place):
        yield place
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True, timeout=60)
        image.unlink()


def _try_mount(image: Path, place: Path) -> bool:
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
        return False
    with image.open("wb") as file:
        file.truncate(2 * 1024**3)
    # Otherwise the kernel initializes the file system during the measurement.
    now = "lazy_itable_init=0,lazy_journal_init=0"
    subprocess.run(["mkfs.ext4", "-q", "-F", "-E", now, image], check=True, timeout=60)
    # In a container even root may lack the permission.
    mount = ["mount", "-o", "loop", image, place]
    return subprocess.run(mount, check=False, capture_output=True, timeout=60).returncode == 0


def _make_directory(path: Path) -> Path:
    path.mkdir()
    return path


def write_config(config: Path, count: int, begin: str, changed: int) -> None:
    owner = {"user": {"id": os.geteuid()}, "group": {"id": os.getegid()}}

    def entry(number: int) -> dict[str, object]:
        text = f"{'other' if number == changed else begin} {number} ".encode().ljust(SIZE, b"x")
        source = f"data:;base64,{base64.b64encode(text).decode()}"
        path = f"/etc/bench/{number // PER_DIRECTORY}/{number}"
        return {"path": path, "mode": 0o644, "contents": {"source": source}, **owner}

    files = [entry(number) for number in range(count)]
    config.write_text(json.dumps({"ignition": {"version": "3.5.0"}, "storage": {"files": files}}))
