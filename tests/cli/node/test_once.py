"""The command, on directories."""

import base64
import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests import oracle
from tests.fixtures.files import read_links
from treenail.api import documents
from treenail.api.machineconfig import MachineConfig
from treenail.cli.node.main import main
from treenail.cli.output_format import API_VERSION
from treenail.config.wanted_state import read_wanted_state

CANARY = "canary-7e2b91"
RENDERED = sorted((oracle.ROOT / "bootstrap/output/machine-configs").glob("*.yaml"))
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")
SYSTEMCTL = shutil.which("systemctl")


def data_url(text: str) -> str:
    return "data:;base64," + base64.b64encode(text.encode()).decode()


def written(path: Path, storage: object = None, **sections: object) -> str:
    """A file with an Ignition config, whose files belong to the user that runs the tests."""
    document = {"ignition": {"version": "3.5.0"}, "storage": storage or {}, **sections}
    path.write_text(json.dumps(document))
    return str(path)


def entry(path: str, text: str, **others: object) -> dict[str, object]:
    owner = {"user": {"id": os.geteuid()}, "group": {"id": os.getegid()}}
    return {"path": path, "contents": {"source": data_url(text)}, **owner, **others}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    top = tmp_path / "root"
    (top / "etc").mkdir(parents=True)
    return top


def run(*arguments: object) -> int:
    return main(["once", *map(str, arguments)])


def tree(root: Path) -> dict[str, tuple[str, int, str]]:
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        text = str(path.readlink()) if path.is_symlink() else ""
        if path.is_file() and not path.is_symlink():
            text = path.read_text()
        found[str(path.relative_to(root))] = (
            stat.filemode(status.st_mode),
            status.st_mtime_ns,
            text,
        )
    return found


def test_once_second_run_changes_nothing(tmp_path, root, capsys):
    file = written(
        tmp_path / "a.json",
        {"files": [entry("/etc/one", "1"), entry("/opt/d/two", "2", mode=0o600)]},
    )
    assert run(file, "--root", root) == 0
    assert (root / "etc/one").read_text() == "1"
    assert stat.S_IMODE((root / "opt/d/two").stat().st_mode) == 0o600
    before = tree(root)
    capsys.readouterr()
    assert run(file, "--root", root) == 0
    assert capsys.readouterr().out == "nothing to do\n"
    assert {path: seen for path, seen in tree(root).items() if "lock" not in path} == {
        path: seen for path, seen in before.items() if "lock" not in path
    }


def test_once_removed_file_is_restored_from_backup(tmp_path, root):
    (root / "etc/motd").write_text("the vendor's")
    (root / "etc/motd").chmod(0o640)
    first = written(tmp_path / "a", {"files": [entry("/etc/motd", "ours"), entry("/etc/x", "x")]})
    assert run(first, "--root", root) == 0
    assert (root / "etc/motd").read_text() == "ours"
    assert run(written(tmp_path / "b"), "--root", root) == 0
    assert (root / "etc/motd").read_text() == "the vendor's"
    assert stat.S_IMODE((root / "etc/motd").stat().st_mode) == 0o640
    assert not (root / "etc/x").exists()
    assert not list((root / "var/lib/treenail/original").rglob("*.original"))


def test_once_json_lists_steps_and_skipped_parts(tmp_path, root, capsys):
    file = tmp_path / "mc.yaml"
    file.write_text(
        documents.dump_document(
            {
                "apiVersion": "machineconfiguration.openshift.io/v1",
                "kind": "MachineConfig",
                "metadata": {"name": "rendered-a"},
                "spec": {
                    "kernelArguments": ["quiet"],
                    "kernelType": "realtime",
                    "extensions": ["usbguard"],
                    "osImageURL": "quay.io/example/os:1",
                    "config": {
                        "ignition": {"version": "3.4.0"},
                        "storage": {
                            "files": [entry("/etc/a", "a")],
                            "disks": [{"device": "/dev/sda"}],
                        },
                    },
                },
            }
        )
    )
    assert run(file, "--root", root, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "apiVersion": API_VERSION,
        "kind": "AppliedConfig",
        "changed": True,
        "steps": [
            "write /etc/a (0644): missing",
            "record what belongs to rendered-a",
        ],
        "notes": [],
        "skipped": [
            "osImageURL (quay.io/example/os:1): belongs to the operating system, not to files",
            "kernelArguments (quiet): belongs to the operating system, not to files",
            "kernelType (realtime): belongs to the operating system, not to files",
            "extensions (usbguard): belongs to the operating system, not to files",
            "storage.disks: applies at the first boot only",
        ],
        "rebootNeeded": False,
        "reasons": [],
        "recovery": None,
    }


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (None, 64, "cannot read"),
        ("- a\n", 1, "expected an object"),
        ("kind: Secret\n", 1, "expected a MachineConfig or an Ignition config, found neither"),
        ("ignition: {version: 9.0.0}\n", 1, "spec.config.ignition.version: expected one of"),
        (
            json.dumps({"ignition": {"version": "3.5.0"}, "storage": {"files": [{"path": "etc"}]}}),
            1,
            "spec.config.storage.files[0].path",
        ),
        (
            json.dumps(
                {
                    "ignition": {"version": "3.5.0"},
                    "storage": {"files": [{"path": "/a", "append": [{"source": "data:,a"}]}]},
                }
            ),
            1,
            "files[0].append: cannot append to a file of a running node",
        ),
    ],
)
def test_once_invalid_input_changes_nothing(tmp_path, root, capsys, content, code, message):
    file = tmp_path / "config"
    if content is not None:
        file.write_text(content)
    assert run(file, "--root", root) == code
    assert message in capsys.readouterr().err
    assert list(root.rglob("*")) == [root / "etc"]


def test_once_unknown_owner_changes_nothing(tmp_path, root, capsys):
    files = [entry("/etc/a", "a"), {**entry("/etc/b", "b"), "user": {"name": "no-such-user"}}]
    assert run(written(tmp_path / "a", {"files": files}), "--root", root) == 1
    assert "there is no user no-such-user on this machine" in capsys.readouterr().err
    assert not (root / "etc/a").exists()


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("merge", [{"source": "data:,%7B%7D"}]),
        ("replace", {"source": "https://example.com/a.ign"}),
    ],
)
def test_once_config_with_includes_changes_nothing(tmp_path, root, capsys, name, others):
    ignition = {"version": "3.5.0", "config": {name: others}}
    file = written(tmp_path / "a", {"files": [entry("/etc/a", "a")]}, ignition=ignition)
    assert run(file, "--root", root) == 1
    assert capsys.readouterr().err == (
        f"treenail: spec.config.ignition.config.{name}: a node fetches no other configs\n"
        "  put their contents into this config\n"
    )
    assert not (root / "etc/a").exists()


def test_once_ignition_config_names_skipped_parts(tmp_path, root, capsys):
    ignition = {
        "version": "3.5.0",
        "config": {"merge": [], "replace": {"verification": {"hash": None}}},
        "security": {"tls": {"certificateAuthorities": [{"source": "data:,a"}]}},
        "timeouts": {"httpTotal": 3},
        "proxy": {"noProxy": []},
    }
    users = [{"name": "core", "uid": 0, "groups": [], "shouldExist": False, "shell": "/bin/sh"}]
    file = written(tmp_path / "a", ignition=ignition, passwd={"users": users})
    assert run(file, "--root", root, "--json") == 0
    assert json.loads(capsys.readouterr().out)["skipped"] == [
        "ignition.security: applies at the first boot only",
        "ignition.timeouts: applies at the first boot only",
        "passwd.users[0] (uid, shouldExist, shell): only SSH keys and password hashes are applied",
    ]


def test_once_missing_root_is_usage_error(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        run(written(tmp_path / "a"), "--root", tmp_path / "none")
    assert ended.value.code == 64
    assert "--root: there is no directory" in capsys.readouterr().err


def test_once_failed_step_is_undone_and_named(tmp_path, root, capsys):
    (root / "etc/dir/in").mkdir(parents=True)
    (root / "etc/old").write_text("old")
    before = {path: (seen[0], seen[2]) for path, seen in tree(root).items()}
    files = [entry("/etc/old", "new"), entry("/etc/new", "new"), entry("/etc/dir", "a file")]
    assert run(written(tmp_path / "a", {"files": files}), "--root", root) == 1
    printed = capsys.readouterr().err
    assert (
        "treenail: cannot write /etc/dir (0644): kind file instead of directory: cannot write "
        f"{root}/etc/dir: a directory exists at this path; all steps were undone\n"
        f"  move {root}/etc/dir away\n"
    ) in printed
    after = {path: (seen[0], seen[2]) for path, seen in tree(root).items()}
    assert {path: seen for path, seen in after.items() if not path.startswith("var")} == before


def test_once_failed_step_leaves_the_stored_config(tmp_path, root, capsys):
    copy = root / "var/lib/treenail/once.json"
    good = written(tmp_path / "a", {"files": [entry("/etc/a", "first")]})
    (root / "etc/dir").mkdir()
    broken = written(tmp_path / "b", {"files": [entry("/etc/a", "b"), entry("/etc/dir", "b")]})
    assert run(good, "--root", root) == 0
    before = copy.read_text()
    assert run(broken, "--root", root) == 1
    assert copy.read_text() == before
    assert data_url("first") in before


def test_once_config_that_cannot_be_stored_is_not_applied(tmp_path, root, capsys):
    (root / "var/lib/treenail/once.json").mkdir(parents=True)
    config = written(tmp_path / "a", {"files": [entry("/etc/a", "first")]})
    assert run(config, "--root", root) == 1
    assert not (root / "etc/a").exists()
    printed = capsys.readouterr().err
    assert "cannot store the config in /var/lib/treenail/once.json: " in printed
    assert "all steps were undone" in printed


def test_once_backs_up_a_file_with_a_long_name(tmp_path, root):
    name = 250 * "n"
    (root / "etc" / name).write_text("theirs")
    storage = {"files": [entry("/etc/new/one", "1"), entry(f"/etc/{name}", "ours")]}
    assert run(written(tmp_path / "a.json", storage), "--root", root) == 0
    assert (root / "etc" / name).read_text() == "ours"
    assert run(written(tmp_path / "b.json", {"files": []}), "--root", root) == 0
    assert (root / "etc" / name).read_text() == "theirs"
    assert not (root / "etc/new/one").exists()


def test_once_links_do_not_lead_outside_root(tmp_path, root):
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "etc/up").symlink_to("../../../outside")
    (root / "etc/abs").symlink_to("/outside")
    files = [entry("/etc/up/a", "a"), entry("/etc/abs/b", "b")]
    assert run(written(tmp_path / "a", {"files": files}), "--root", root) == 0
    assert list(outside.iterdir()) == []
    assert {path.name for path in (root / "outside").iterdir()} == {"a", "b"}


@needs_root
def test_once_output_contains_no_secret(tmp_path, root, capsys, caplog):
    (root / "etc/passwd").write_text("core:x:1000:1000::/home/core:/bin/sh\n")
    (root / "etc/group").write_text("core:x:1000:\n")
    (root / "etc/shadow").write_text(f"core:{CANARY}old:1::::::\n")
    (root / "etc/shadow").chmod(0)
    (root / "etc/dir").mkdir()
    user = {"name": "core", "passwordHash": CANARY, "sshAuthorizedKeys": [f"ssh-rsa {CANARY}"]}
    files = [entry("/etc/secret", CANARY, mode=0o600)]
    unit = {
        "name": "a.service",
        "enabled": True,
        "contents": f"[Service]\nEnvironment=A={CANARY}\n",
        "dropins": [{"name": "b.conf", "contents": f"# {CANARY}"}],
    }
    caplog.set_level("DEBUG")
    sections = {"passwd": {"users": [user]}, "systemd": {"units": [unit]}}
    broken = written(tmp_path / "b", {"files": [*files, entry("/etc/dir", CANARY)]}, **sections)
    good = written(tmp_path / "a", {"files": files}, **sections)
    assert run(broken, "--root", root) == 1
    assert (root / "etc/shadow").read_text() == f"core:{CANARY}old:1::::::\n"
    assert run(good, "--root", root, "--json") == 0
    assert run(good, "--root", root) == 0
    printed = capsys.readouterr()
    assert CANARY not in printed.out + printed.err + caplog.text
    assert f"core:{CANARY}:" in (root / "etc/shadow").read_text()
    keys = root / "home/core/.ssh/authorized_keys.d/ignition"
    assert keys.read_text() == f"ssh-rsa {CANARY}\n"
    assert [(stat.S_IMODE(p.stat().st_mode), p.stat().st_uid) for p in (keys, keys.parent)] == [
        (0o600, 1000),
        (0o700, 1000),
    ]
    # Of the config, files and units are kept to compare with, for root alone.
    copy = root / "var/lib/treenail/once.json"
    assert (stat.S_IMODE(copy.stat().st_mode), "passwd" in copy.read_text()) == (0o600, False)
    holding = [path for path in root.rglob("var/lib/treenail/**/*") if path.is_file()]
    assert [path for path in holding if CANARY in path.read_text()] == [copy]


@pytest.mark.process
@needs_root
@oracle.needs_oracle
@pytest.mark.parametrize("rendered", RENDERED, ids=lambda path: path.stem.rsplit("-", 1)[0])
def test_once_real_rendered_config_is_applied(tmp_path, root, rendered, capsys):
    (root / "etc/passwd").write_text("core:x:1000:1000::/home/core:/bin/sh\nx:x:800:800::/:/\n")
    (root / "etc/group").write_text("core:x:1000:\n")
    (root / "etc/shadow").write_text("core:*:1::::::\n")
    wish = read_wanted_state(
        MachineConfig.from_json(documents.load_document(rendered.read_bytes(), where="rendered"))
    )
    assert run(rendered, "--root", root) == 0
    for path, file in wish.files.items():
        assert (root / path[1:]).read_bytes() == file.contents.decode_bytes(), path
        assert stat.S_IMODE((root / path[1:]).lstat().st_mode) == file.mode, path
    for path, text in wish.list_unit_files().items():
        assert (root / path[1:]).read_text() == text, path
    for path in wish.list_masks():
        assert str((root / path[1:]).readlink()) == "/dev/null", path
    for path, link in wish.links.items():
        assert str((root / path[1:]).readlink()) == link.target, path
    capsys.readouterr()
    assert run(rendered, "--root", root, "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["changed"], again["steps"]) == (False, [])
    enabled = [name for name, unit in wish.units.items() if unit.enabled and unit.contents]
    if SYSTEMCTL is not None and enabled:
        links = read_links(root / "etc/systemd/system")
        subprocess.run(
            [SYSTEMCTL, f"--root={root}", "--quiet", "enable", *enabled],
            check=True,
            capture_output=True,
            timeout=60,
        )
        assert read_links(root / "etc/systemd/system") == links


def test_once_on_mcd_node_uses_its_backups(tmp_path, root):
    mcd = root / "etc/machine-config-daemon"
    mcd.mkdir()
    (mcd / "orig/etc").mkdir(parents=True)
    (mcd / "orig/etc/motd.mcdorig").write_text("the vendor's")
    (root / "etc/motd").write_text("ours")
    (root / "etc/gone").write_text("ours")
    config = {
        "ignition": {"version": "3.4.0"},
        "storage": {"files": [entry("/etc/motd", "ours"), entry("/etc/gone", "ours")]},
    }
    (mcd / "currentconfig").write_text(
        json.dumps({"metadata": {"name": "rendered-a"}, "spec": {"config": config}})
    )
    assert run(written(tmp_path / "a"), "--root", root) == 0
    assert (root / "etc/motd").read_text() == "the vendor's"
    assert not (root / "etc/gone").exists()


def test_once_file_lost_with_its_parent_link_is_undone(tmp_path, root, capsys):
    owner = {"user": {"id": os.geteuid()}, "group": {"id": os.getegid()}}
    links = [{"path": "/opt/l", "target": "d", **owner}]
    there = {"files": [entry("/opt/d/x", "1")], "links": links}
    assert run(written(tmp_path / "a.json", there), "--root", root) == 0
    behind = written(tmp_path / "b.json", {"files": [entry("/opt/l/x", "1")]})
    assert run(behind, "--root", root) == 1
    printed = capsys.readouterr().err
    assert "cannot verify the applied steps" in printed
    assert "write /opt/l/x (0644): missing" in printed
    assert (root / "opt/l/x").samefile(root / "opt/d/x")
