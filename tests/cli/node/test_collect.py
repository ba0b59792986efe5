"""``treenail collect`` puts everything into one file, but no secret."""

import gzip
import io
import json
import os
import stat
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.fakes.clock import FakeClock
from tests.fixtures import canaries
from tests.fixtures.files import read_parts, write_files, write_programs
from treenail.cli.node.collect import JOURNAL_UNITS, MAX_PART_BYTES, collect_parts
from treenail.cli.node.main import main
from treenail.cli.output import EXIT_FAILED
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.system.state_file import Ledger
from treenail.log_bundle import LogBundle
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


def open_bundle() -> tuple[LogBundle, io.BytesIO]:
    stream = io.BytesIO()
    return LogBundle(stream, name="here", now=NOW, max_part_bytes=MAX_PART_BYTES), stream


def test_secret_of_a_file_is_withheld_in_every_part() -> None:
    """Nothing in these parts shows that the word is a secret."""
    bundle, stream = open_bundle()
    bundle.hide_secrets([lambda: b"user: a\npassword: correct/horse", lambda: None])
    bundle.add_lines("journal", lambda: "tried correct/horse\nsent correct%2Fhorse")
    bundle.note_missing("other", "correct/horse was refused")
    bundle.close()
    found = read_parts(stream.getvalue())
    assert found["journal"] == b"tried <withheld>\nsent <withheld>"
    assert json.loads(found["index.json"])["missing"] == {"other": "<withheld> was refused"}


@pytest.mark.process
def test_collect_complete_machine_has_every_part_and_no_secret(root: Path, tmp_path: Path) -> None:
    environ = write_programs(
        tmp_path / "bin",
        journalctl=f'echo "$*"; echo "password: {CANARY}"; echo "x eyJhbGciOi.{CANARY}.x"',
        systemctl="echo a.service loaded failed failed",
        bootc=f'echo \'{{"status": {{"booted": null}}, "token": "{CANARY}"}}\'',
    )
    bundle, stream = open_bundle()
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
    bundle.close()
    assert CANARY.encode() not in gzip.decompress(stream.getvalue())
    found = read_parts(stream.getvalue())
    assert json.loads(found["index.json"])["missing"] == bundle.missing
    assert found["kernel-arguments"] == b"quiet\nrd.password=<withheld>\nroot=UUID=1"
    assert found["failed-units"] == b"a.service loaded failed failed\n"
    assert b"--unit kubelet.service" in found["journal/kubelet.service"]
    assert "/var/lib/treenail/auth.json" in {
        entry["path"] for entry in json.loads(found["files.json"])
    }


@pytest.mark.process
def test_collect_machine_shows_no_secret_in_any_form(root: Path, tmp_path: Path) -> None:
    """Programs and the records of the agent show every secret in every form."""
    journal = tmp_path / "journal"
    journal.write_text(canaries.format_journal("Nov 21 10:11:12.000 host podman[12]: "))
    environ = write_programs(
        tmp_path / "bin",
        journalctl=f"cat {journal}",
        systemctl=f"cat {journal}",
        bootc=f"python3 -c 'import json; print(json.dumps(dict(a=open(\"{journal}\").read())))'",
    )
    files = canaries.make_secret_files()
    shown = json.dumps({"reason": canaries.format_journal(), "lines": canaries.format_journal()})
    write_files(
        root,
        {
            "var/lib/kubelet/config.json": files["config.json"],
            "var/lib/treenail/auth.json": files["logins.json"],
            "etc/mco/proxy.env": files["proxy.env"],
            "run/treenail/status.json": shown,
            "var/lib/treenail/managed.json": shown,
            "proc/cmdline": " ".join(f"a={word}" for word in canaries.list_words()),
            "etc/treenail/agent.toml": canaries.format_journal("# "),
        },
    )
    bundle, stream = open_bundle()
    collect_parts(bundle, Machine(Root(root), clock=FakeClock(), environ=environ), None)
    bundle.close()
    content = gzip.decompress(stream.getvalue())
    assert b"shown: the next step begins" in content
    assert canaries.find_leaks(content) == []


# Also of the logins before the last change, and of the proxy.
SECRET_FILES = (
    "etc/ostree/auth.json",
    "etc/mco/proxy.env",
    "etc/mco/internal-registry-pull-secret.json",
    "var/lib/kubelet/config.json",
    "etc/kubernetes/kubeconfig",
    "var/lib/kubelet/kubeconfig",
    "var/lib/treenail/auth.json",
    "var/lib/treenail/pull-secret.good.json",
)


@pytest.mark.process
def test_collect_machine_withholds_the_words_of_each_secret_file(
    root: Path, tmp_path: Path
) -> None:
    words = {path: f"correct/horse{number}" for number, path in enumerate(SECRET_FILES)}
    write_files(root, {path: f"user: a\npassword: {word}\n" for path, word in words.items()})
    (tmp_path / "journal").write_text("\n".join(f"tried {word}" for word in words.values()))
    environ = write_programs(tmp_path / "bin", journalctl=f"cat {tmp_path / 'journal'}")
    bundle, stream = open_bundle()
    collect_parts(bundle, Machine(Root(root), clock=FakeClock(), environ=environ), None)
    bundle.close()
    shown = read_parts(stream.getvalue())["journal/treenail.service"].decode()
    assert shown.splitlines() == ["tried <withheld>"] * len(words)


@pytest.mark.process
def test_archive_file_is_private_and_replaces_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "x.tar.gz")
    assert main(["collect", "--root", str(tmp_path), "-o", path]) == 0
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    assert main(["collect", "--root", str(tmp_path), "-o", path]) == EXIT_FAILED


@pytest.mark.process
def test_archive_is_not_written_to_a_terminal(tmp_path: Path) -> None:
    terminal, other = os.openpty()
    with os.fdopen(terminal), os.fdopen(other, "w") as stdout, redirect_stdout(stdout):
        assert main(["collect", "--root", str(tmp_path), "-o", "-"]) == EXIT_FAILED


def test_bundle_part_too_long_keeps_its_end() -> None:
    bundle, stream = open_bundle()
    bundle.add_lines("long", lambda: "\n".join(f"line {number:0100}" for number in range(30_000)))
    bundle.close()
    found = read_parts(stream.getvalue())
    kept = found["long"]
    assert len(kept) < MAX_PART_BYTES + 100
    assert kept.startswith("… truncated at the start\nline ".encode())
    assert kept.endswith(b"029999")
    truncated = {"long": "at least 1082847 bytes left out at the start"}
    assert json.loads(found["index.json"])["truncated"] == truncated


@pytest.mark.process
def test_collect_journal_too_long_requests_fewer_lines(root: Path, tmp_path: Path) -> None:
    environ = write_programs(
        tmp_path / "bin",
        journalctl='case "$*" in *"--lines 250"*) echo few;; *) yes | head -c 2000000;; esac',
    )
    bundle, stream = open_bundle()
    collect_parts(bundle, Machine(Root(root), clock=FakeClock(), environ=environ), None)
    bundle.close()
    found = read_parts(stream.getvalue())
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
