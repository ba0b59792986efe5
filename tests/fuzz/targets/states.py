"""Files that treenail wrote: a disk damages them, and other versions write them."""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tests import oracle
from tests.fakes.clock import FakeClock
from tests.fuzz.target import FuzzTarget, Grammar
from tests.fuzz.targets.scratch import make_directory
from treenail.builder.build_spec import BuildSpec, FetchOutput
from treenail.cli.node.status import collect_status, format_status
from treenail.config.bootstrap_registry import decode_record
from treenail.config.provenance import Provenance
from treenail.config.pullsecret import decode_history, encode_history
from treenail.controllers.handover.image_mode_field import read_settings_configmap
from treenail.controllers.pools.rollout_record import RolloutRecord
from treenail.daemon.configuration.mcd_state import read_first_boot_annotations
from treenail.daemon.local.requests import RequestFile
from treenail.encoding.json_text import parse_json
from treenail.errors import TreenailError
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.rollback.undo_log import LOG_PATH, UndoLog
from treenail.host.system import state_file
from treenail.host.system.state_file import CrashRecordFile, Ledger
from treenail.installer.directory import install_state
from treenail.installer.directory.install_files import InstallDirectory
from treenail.update.state import crash_record, ledger_record
from treenail.update.steps import inventory

_STATUS_PATH = "run/treenail/status.json"


def _write(path: str, content: bytes) -> Root:
    root = make_directory() / "root"
    target = root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    return Root(root)


def _complete(content: bytes, compute: Callable[[dict[str, Any]], str]) -> bytes:
    """Return the document with its checksum, as if treenail had written it."""
    try:
        document = parse_json(content)
    except ValueError:
        return content
    if not isinstance(document, dict):
        return content
    document.pop("checksum", None)
    return json.dumps({**document, "checksum": compute(document)}).encode()


def read_ledger(content: bytes) -> Iterable[str]:
    """Read the ledger with a right checksum, write it again, and print the status."""
    root = _write(state_file.LEDGER_PATH, _complete(content, state_file._compute_checksum))
    ledger = Ledger(root)
    found = ledger_record.from_json(ledger.read_document())
    ledger.write_document(ledger_record.to_json(found))
    assert ledger_record.from_json(ledger.read_document()) == found
    yield from _print_status(root)


def read_status(content: bytes) -> Iterable[str]:
    """Print the status from a status file."""
    root = _write(_STATUS_PATH, content)
    (root.prefix / state_file.LEDGER_PATH.lstrip("/")).unlink(missing_ok=True)
    yield from _print_status(root)


def _print_status(root: Root) -> Iterable[str]:
    machine = Machine(root, clock=FakeClock())
    document = collect_status(machine)
    json.dumps(document).encode()
    yield format_status(document, 80)


def read_crash_record(content: bytes) -> Iterable[str]:
    """Read the crash record."""
    root = _write(state_file.CRASH_RECORD_PATH, _complete(content, state_file._compute_checksum))
    found = crash_record.from_json(CrashRecordFile(root).read_document())
    return [] if found is None else [found.count_start("b").failure]


def read_undo_log(content: bytes) -> Iterable[str]:
    """Read the undo log, with right checksums in front of every other line."""
    lines = content.split(b"\n")
    complete = [
        b"%08x %s" % (zlib.crc32(line), line) if number % 8 else line
        for number, line in enumerate(lines, start=1)
    ]
    root = _write(LOG_PATH, b"\n".join(complete) + b"\n")
    log = UndoLog(root, Disk())
    found = log.read_records()
    for each in found.records if found else ():
        log.parse_inverses(each)
    log.find_last_number()
    return ()


def read_install_state(content: bytes) -> Iterable[str]:
    """Read the state of an installation."""
    complete = _complete(content, install_state.compute_checksum)
    found = install_state.parse_install_record(complete, InstallDirectory(Path("/i")))
    return [str(found)]


def read_small_records(content: bytes) -> Iterable[str]:
    """Read the records that have a reader of their own."""
    files = HostFiles(_write("run/treenail/request.json", content))
    yield str(RequestFile(files).read_request())
    files = HostFiles(_write("etc/machine-config-daemon/node-annotations.json", content))
    document: object = None
    try:
        document = parse_json(content)
    except ValueError as error:
        yield str(error)
    values = document if isinstance(document, dict) else {}
    readers: tuple[Callable[[], object], ...] = (
        lambda: read_first_boot_annotations(files),
        lambda: inventory.from_json(document),
        lambda: decode_record(content, where="record"),
        lambda: encode_history(decode_history(content, where="history")),
        lambda: Provenance.from_json(document),
        lambda: Provenance.from_text(content.decode("utf-8", "replace")),
        lambda: RolloutRecord.from_json(document),
        lambda: BuildSpec.from_json(document).to_json(),
        lambda: FetchOutput.from_json(document).to_json(),
        lambda: read_settings_configmap(values, where="ConfigMap"),
    )
    for read in readers:
        try:
            yield str(read())
        except TreenailError as error:
            yield from (str(error), error.remedy)


def _list_ledgers() -> Iterator[bytes]:
    yield (oracle.DATA / "ledger-0.1.0.json").read_bytes()
    for path in sorted((oracle.DATA / "state").glob("*/ledger.json")):
        yield path.read_bytes()


def _list_statuses() -> Iterator[bytes]:
    yield json.dumps(
        {
            "version": 1, "written": "2027-01-15T08:00:00Z", "activity": "staging",
            "backend": {"name": "bootc", "reason": "x"},
            "progress": {"text": "pulling", "percent": 5},
            "failure": {"message": "a", "remedy": "b"}, "drift": [{"path": "/a"}],
            "apiServer": {"reachable": False, "problem": "x"}, "credentialProblems": ["a"],
        }
    ).encode()  # fmt: skip


def _list_crash_records() -> Iterator[bytes]:
    for path in sorted((oracle.DATA / "state").glob("*/crash-record.json")):
        yield path.read_bytes()


def _list_undo_logs() -> Iterator[bytes]:
    for path in (oracle.DATA / "undo-0.1.0.log", *(oracle.DATA / "state").glob("*/undo-pending")):
        lines = path.read_bytes().split(b"\n")
        yield b"\n".join(line.partition(b" ")[2] for line in lines)


def _list_install_states() -> Iterator[bytes]:
    step = {
        "name": "render", "state": "done", "inputs": {"a": "b"}, "began": "2026-01-01T00:00:00Z",
        "ended": "2026-01-01T00:00:00Z", "result": {"c": "d"}, "reason": "", "remedy": "",
        "attempts": 1,
    }  # fmt: skip
    yield json.dumps(
        {"version": 1, "id": "a", "began": "2026-01-01T00:00:00Z", "steps": [step]}
    ).encode()


def _list_small_records() -> Iterator[bytes]:
    for name in ("request.json", "managed.json"):
        for path in sorted((oracle.DATA / "state").glob(f"*/{name}")):
            yield path.read_bytes()
    yield b'{"machineconfiguration.openshift.io/currentConfig": "rendered-worker-1"}'
    yield b'{"registry":"a.example.com","username":"u","password":"p","repositories":["a/b"]}'
    yield b'{"auths": {"q": {"auth": "YTpi"}}, "rejected": {"q": "abc"}}'
    yield b'{"config": "new", "image": "i", "wave": 1, "settledAt": 5, "forgiven": ["a"]}'
    yield b'{"pushSpec": "r/a:b", "architecture": "amd64", "userLine": 3, "secrets": ["a"]}'
    mode = json.dumps({"enabled": True, "pools": [{"name": "worker"}]})
    yield json.dumps(
        {"data": {"imageMode": mode, "image-mode.json": mode, "settings": mode}}
    ).encode()


TARGETS = (
    FuzzTarget("ledger", read_ledger, _list_ledgers, Grammar.JSON),
    FuzzTarget("status-file", read_status, _list_statuses, Grammar.JSON),
    FuzzTarget("crash-record", read_crash_record, _list_crash_records, Grammar.JSON),
    FuzzTarget("undo-log", read_undo_log, _list_undo_logs, Grammar.LINES),
    FuzzTarget("install-state", read_install_state, _list_install_states, Grammar.JSON),
    FuzzTarget("small-records", read_small_records, _list_small_records, Grammar.JSON),
)
