"""``treenail collect`` puts everything into one file, but no secret."""

import gzip
import json
import stat
from pathlib import Path

import pytest

from tests.fakes.clock import FakeClock
from tests.fixtures.files import read_parts, write_programs
from treenail.cli.node.collect import JOURNAL_UNITS, MAX_PART_BYTES, Bundle, collect_parts
from treenail.cli.node.main import main
from treenail.errors import FileError
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.system.state_file import Ledger
from treenail.update.state.ledger_record import (
    LedgerRecord,
    PastUpdate,
    QuarantinedTarget,
    Target,
    UpdateOutcome,
    to_json,
)

CANARY = "Canary7Zq"
NOW = 1_700_000_000.0
KUBECONFIG = f"""\
current-context: a
contexts: [{{name: a, context: {{cluster: a, user: a}}}}]
clusters: [{{name: a, cluster: {{server: "https://127.0.0.1:1"}}}}]
users: [{{name: a, user: {{token: {CANARY}}}}}]
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine that has a secret wherever one can stand."""
    root = tmp_path / "root"
    refused = QuarantinedTarget(Target("b"), f"can't pull https://me:{CANARY}@registry.example/os")
    past = PastUpdate(
        "1", Target("b"), Target(), 1.0, 2.0, UpdateOutcome.FAILED, failure=f"token={CANARY}"
    )
    texts = {
        "proc/cmdline": f"quiet rd.password={CANARY} root=UUID=1",
        "proc/sys/kernel/random/boot_id": "a-b",
        "proc/stat": "btime 1600000000\n",
        "run/treenail/status.json": json.dumps(
            {"activity": f"Bearer {CANARY}{CANARY}", "auth": CANARY}
        ),
        "etc/os-release": "ID=fcos\n",
        "etc/treenail/agent.toml": f'# password = "{CANARY}"\nnode_name = "a"\n',
        "var/lib/kubelet/kubeconfig": KUBECONFIG,
        "var/lib/treenail/auth.json": CANARY,
        "var/lib/treenail/managed.json": json.dumps({"paths": ["/etc/a"], "secret": CANARY}),
        "etc/machine-config-daemon/currentconfig": CANARY,
    }
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    Ledger(Root(root)).write_document(to_json(LedgerRecord(quarantined=refused, history=(past,))))
    return root


@pytest.mark.process
def test_collect_complete_machine_has_every_part_and_no_secret(root: Path, tmp_path: Path) -> None:
    environ = write_programs(
        tmp_path / "bin",
        journalctl=f'echo "$*"; echo "password: {CANARY}"; echo "x eyJhbGciOi.{CANARY}.x"',
        systemctl="echo a.service loaded failed failed",
        bootc=f'echo \'{{"status": {{"booted": null}}, "token": "{CANARY}"}}\'',
    )
    bundle = Bundle(name="here", now=NOW)
    collect_parts(bundle, Machine(Root(root), clock=FakeClock(), environ=environ), None)
    # Whether a system bus answers is this machine's affair.
    assert set(bundle.part_names) - {"deployments.json"} == {
        "versions.json",
        "boot.json",
        "status.json",
        "live.json",
        "ledger.json",
        "managed.json",
        "settings.toml",
        "kernel-arguments",
        "disks.json",
        "files.json",
        "bootc.json",
        "failed-units",
        *(f"journal/{unit}" for unit in JOURNAL_UNITS),
    }
    assert set(bundle.missing) - {"deployments.json"} == {"node.json", "plan.json", "drift.json"}
    bundle.write_archive(str(tmp_path / "x.tar.gz"))
    packed = (tmp_path / "x.tar.gz").read_bytes()
    assert CANARY.encode() not in gzip.decompress(packed)
    found = read_parts(packed)
    assert json.loads(found["index.json"])["missing"] == bundle.missing
    assert found["kernel-arguments"] == b"quiet\nrd.password=<withheld>\nroot=UUID=1"
    assert found["failed-units"] == b"a.service loaded failed failed\n"
    assert b"--unit kubelet.service" in found["journal/kubelet.service"]
    assert "/var/lib/treenail/auth.json" in {
        entry["path"] for entry in json.loads(found["files.json"])
    }


def test_archive_file_is_private_and_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.tar.gz"
    Bundle(name="here", now=NOW).write_archive(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileError, match="the file exists"):
        Bundle(name="here", now=NOW).write_archive(str(path))


def test_bundle_part_too_long_keeps_its_end(tmp_path: Path) -> None:
    bundle = Bundle(name="here", now=NOW)
    bundle.add_lines("long", lambda: "\n".join(f"line {number:0100}" for number in range(30_000)))
    bundle.write_archive(str(tmp_path / "x.tar.gz"))
    kept = read_parts((tmp_path / "x.tar.gz").read_bytes())["long"]
    assert len(kept) < MAX_PART_BYTES + 100
    assert kept.startswith("… truncated at the start\nline ".encode())
    assert kept.endswith(b"029999")


@pytest.mark.process
def test_collect_journal_too_long_requests_fewer_lines(root: Path, tmp_path: Path) -> None:
    environ = write_programs(
        tmp_path / "bin",
        journalctl='case "$*" in *"--lines 250"*) echo few;; *) yes | head -c 2000000;; esac',
    )
    bundle = Bundle(name="here", now=NOW)
    collect_parts(bundle, Machine(Root(root), clock=FakeClock(), environ=environ), None)
    bundle.write_archive(str(tmp_path / "x.tar.gz"))
    found = read_parts((tmp_path / "x.tar.gz").read_bytes())
    assert found["journal/treenail.service"] == b"few\n"


@pytest.mark.process
def test_collect_empty_machine_writes_archive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "x.tar.gz"
    assert main(["collect", "--json", "--root", str(tmp_path), "-o", str(output)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["file"] == str(output)
    assert "ledger.json" in document["missing"]
    assert output.stat().st_size > 0
