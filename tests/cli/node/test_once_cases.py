"""Cases that went wrong on other people's nodes, by the whole command, on directories."""

import base64
import json
import os
import stat
from pathlib import Path

import pytest

from treenail.cli.node.main import main

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")

UNITS = "etc/systemd/system"
WANTED_BY = "[Install]\nWantedBy=multi-user.target\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    top = tmp_path / "root"
    for directory in ("home/core", "usr/lib/systemd/system-preset", UNITS):
        (top / directory).mkdir(parents=True)
    (top / "etc/passwd").write_text("core:x:1000:1001::/home/core:/bin/sh\n")
    (top / "etc/group").write_text("core:x:1001:\n")
    (top / "etc/shadow").write_text("core:*:1::::::\n")
    (top / "etc/motd").write_text("the vendor's")
    return top


class Node:
    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self.capsys = capsys

    def bring(self, **sections: object) -> list[str]:
        """The steps and notes; the second time there are no steps."""
        config = self.root.parent / "config.json"
        config.write_text(json.dumps({"ignition": {"version": "3.4.0"}, **sections}))
        found = self._once(config)
        assert self._once(config)["steps"] == []
        return [*found["steps"], *found["notes"]]

    def _once(self, config: Path) -> dict[str, list[str]]:
        self.capsys.readouterr()
        assert main(["once", str(config), "--root", str(self.root), "--json"]) == 0
        return json.loads(self.capsys.readouterr().out)

    def seen(self, path: str) -> tuple[str, str] | None:
        """Mode and content, or a link's text."""
        place = self.root / path
        if place.is_symlink():
            return "link", str(place.readlink())
        if not place.exists():
            return None
        mode = stat.filemode(place.stat().st_mode)
        return mode, place.read_text() if place.is_file() else ""

    def owner(self, path: str) -> tuple[int, int]:
        status = (self.root / path).lstat()
        return status.st_uid, status.st_gid


@pytest.fixture
def node(root: Path, capsys: pytest.CaptureFixture[str]) -> Node:
    return Node(root, capsys)


def files(*paths: str, text: str = "ours") -> dict[str, object]:
    source = "data:;base64," + base64.b64encode(text.encode()).decode()
    return {"files": [{"path": f"/{path}", "contents": {"source": source}} for path in paths]}


def unit(name: str = "a.service", **fields: object) -> dict[str, object]:
    return {"units": [{"name": name, **fields}]}


def test_vendor_file_is_restored_when_config_drops_it(node):
    node.bring(storage=files("etc/motd", "etc/only-ours", "etc/dir/only-ours"))
    node.bring()
    assert node.seen("etc/motd") == ("-rw-r--r--", "the vendor's")
    assert node.seen("etc/only-ours") is None
    assert not [path for path in node.root.rglob("*") if path.name.endswith(".original")]


def test_dangling_link_is_backed_up_and_restored(node):
    (node.root / "etc/link").symlink_to("nowhere")
    node.bring(storage=files("etc/link"))
    assert node.seen("etc/link") == ("-rw-r--r--", "ours")
    node.bring()
    assert node.seen("etc/link") == ("link", "nowhere")


def test_dangling_link_in_mcd_backup_is_restored(node):
    kept = node.root / "etc/machine-config-daemon/orig/etc/motd.mcdorig"
    kept.parent.mkdir(parents=True)
    kept.symlink_to("nowhere")
    node.bring(storage=files("etc/motd"))
    assert node.seen("etc/motd") == ("-rw-r--r--", "ours")
    node.bring()
    assert node.seen("etc/motd") == ("link", "nowhere")


def test_link_at_file_path_is_replaced_and_its_target_kept(node):
    (node.root / "etc/link").symlink_to("motd")
    node.bring(storage=files("etc/link"))
    assert node.seen("etc/link") == ("-rw-r--r--", "ours")
    assert node.seen("etc/motd") == ("-rw-r--r--", "the vendor's")


def test_pull_secret_is_never_backed_up(node):
    secret = node.root / "var/lib/kubelet/config.json"
    secret.parent.mkdir(parents=True)
    secret.write_text("an old secret")
    node.bring(storage=files("var/lib/kubelet/config.json"))
    copies = [path for path in node.root.rglob("*") if path.is_file() and path != secret]
    assert not [path for path in copies if "an old secret" in path.read_text()]


def test_file_that_becomes_dropin_stays(node):
    path = f"{UNITS}/a.service.d/x.conf"
    node.bring(storage=files(path, text="[Unit]\n"))
    dropins = [{"name": "x.conf", "contents": "[Unit]\n"}]
    node.bring(systemd=unit(dropins=dropins))
    assert node.seen(path) == ("-rw-r--r--", "[Unit]\n")
    node.bring(storage=files(path, text="[Unit]\n"))
    assert node.seen(path) == ("-rw-r--r--", "[Unit]\n")


def test_certificates_remain_when_config_drops_them(node):
    path = "etc/docker/certs.d/registry/ca.crt"
    node.bring(storage=files(path))
    node.bring()
    assert node.seen(path) == ("-rw-r--r--", "ours")


def test_large_config_is_applied(node):
    node.bring(storage=files("etc/large", text="x" * 3_000_000))
    assert (node.root / "etc/large").stat().st_size == 3_000_000


def test_missing_unit_is_noted_and_skipped(node):
    assert node.bring(systemd=unit(enabled=True)) == [
        "record what belongs to the config",
        "enabling a.service has no effect: no such unit on this machine",
    ]


def test_vendor_unit_returns_to_preset_when_config_drops_it(node):
    vendor = node.root / "usr/lib/systemd/system"
    vendor.mkdir()
    (vendor / "a.service").write_text(WANTED_BY)
    (node.root / "usr/lib/systemd/system-preset/1.preset").write_text("disable *\n")
    link = f"{UNITS}/multi-user.target.wants/a.service"
    node.bring(systemd=unit(enabled=True))
    assert node.seen(link) == ("link", "/usr/lib/systemd/system/a.service")
    node.bring()
    assert node.seen(link) is None


@pytest.mark.parametrize("contents", ["", None])
def test_empty_dropin_is_removed(node, contents):
    path = f"{UNITS}/a.service.d/x.conf"
    node.bring(systemd=unit(dropins=[{"name": "x.conf", "contents": "[Unit]\n"}]))
    node.bring(systemd=unit(dropins=[{"name": "x.conf", "contents": contents}]))
    assert node.seen(path) is None


def test_mask_overrides_contents_and_is_removed(node):
    path = f"{UNITS}/a.service"
    node.bring(systemd=unit(mask=True, contents=WANTED_BY))
    assert node.seen(path) == ("link", "/dev/null")
    node.bring(systemd=unit(mask=False, contents=WANTED_BY, enabled=True))
    assert node.seen(path) == ("-rw-r--r--", WANTED_BY)
    assert node.seen(f"{UNITS}/multi-user.target.wants/a.service") is not None
    node.bring(systemd=unit(mask=True))
    assert node.seen(path) == ("link", "/dev/null")
    node.bring(systemd=unit(mask=False))
    assert node.seen(path) is None


def test_unit_with_install_section_is_linked_by_it_only(node):
    node.bring(systemd=unit(enabled=True, contents=WANTED_BY))
    node.bring(systemd=unit(enabled=True, contents=WANTED_BY.replace("multi-user", "other")))
    links = sorted(path.parent.name for path in node.root.glob(f"{UNITS}/*.wants/*"))
    assert links == ["other.target.wants"]


def test_unit_without_settings_causes_no_step(node):
    units = {"units": [{"name": f"{n}.service", "contents": WANTED_BY, "enabled": True}
                       for n in "ab"]}  # fmt: skip
    node.bring(systemd=units)
    units["units"][0]["contents"] += "# changed\n"
    steps = node.bring(systemd=units)
    assert [step for step in steps if "a.service" in step] != []
    assert [step for step in steps if "b.service" in step] == []


KEYS = "home/core/.ssh/authorized_keys.d/ignition"


def core(**fields: object) -> dict[str, object]:
    return {"users": [{"name": "core", **fields}]}


@pytest.mark.parametrize("before", ["nothing", "of root", "too open", "without directory"])
def test_ssh_keys_are_written_where_sshd_reads_them(node, before):
    ssh = node.root / "home/core/.ssh"
    if before != "nothing":
        ssh.mkdir(0o755)
        (ssh / "known_hosts").write_text("theirs")
    if before in {"of root", "too open"}:
        (ssh / "authorized_keys.d").mkdir(0o777)
    if before == "too open":
        for path in (ssh, ssh / "authorized_keys.d"):
            os.chown(path, 1000, 1001)
            path.chmod(0o777)
    node.bring(passwd=core(sshAuthorizedKeys=["ssh-rsa A", "ssh-rsa B"]))
    assert node.seen(KEYS) == ("-rw-------", "ssh-rsa A\nssh-rsa B\n")
    assert node.seen("home/core/.ssh") == ("drwx------", "")
    assert node.seen("home/core/.ssh/authorized_keys.d") == ("drwx------", "")
    for path in ("home/core/.ssh", "home/core/.ssh/authorized_keys.d", KEYS):
        assert node.owner(path) == (1000, 1001)
    if before != "nothing":
        assert node.seen("home/core/.ssh/known_hosts") == ("-rw-r--r--", "theirs")


def test_ssh_keys_and_password_change_independently(node):
    node.bring(passwd=core(sshAuthorizedKeys=["A"], passwordHash="$6$one"))
    steps = node.bring(passwd=core(sshAuthorizedKeys=["B"], passwordHash="$6$one"))
    assert steps == ["write 1 SSH keys of core: keys differ"]
    steps = node.bring(passwd=core(sshAuthorizedKeys=["B"], passwordHash="$6$two"))
    assert steps == ["set the password of core: password differs"]


def test_dropped_user_loses_keys_and_password_is_locked(node):
    node.bring(passwd=core(sshAuthorizedKeys=["A"], passwordHash="$6$one"))
    node.bring()
    assert node.seen(KEYS) == ("-rw-------", "")
    assert (node.root / "etc/shadow").read_text().startswith("core:*:")


def test_user_other_than_core_is_skipped_and_noted(node):
    shadow = (node.root / "etc/shadow").read_text()
    notes = node.bring(passwd={"users": [{"name": "eve", "passwordHash": "$6$one"}]})
    assert "skipped user eve: a config can set keys and password of core only" in notes
    assert (node.root / "etc/shadow").read_text() == shadow


def test_changed_file_is_rewritten_and_touched_file_is_not(node):
    node.bring(storage=files("etc/a", "etc/b", "etc/c"))
    os.utime(node.root / "etc/a", (1, 1))
    (node.root / "etc/b").chmod(0o600)
    (node.root / "etc/c").unlink()
    assert node.bring(storage=files("etc/a", "etc/b", "etc/c")) == [
        "write /etc/b (0644): mode 0644 instead of 0600",
        "write /etc/c (0644): missing",
    ]


def test_hard_link_is_updated_with_its_file(node):
    links = [{"path": "/usr/lib/x", "target": "/etc/a", "hard": True}]
    for text in ("one", "two"):
        node.bring(storage={**files("etc/a", text=text), "links": links})
        assert (node.root / "usr/lib/x").samefile(node.root / "etc/a")
        assert node.seen("usr/lib/x") == ("-rw-r--r--", text)
    node.bring()
    assert node.seen("usr/lib/x") is None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("usr/local/bin/x", "var/usrlocal/bin/x"),
        ("var/usrlocal/bin/x", "usr/local/bin/x"),
    ],
)
@pytest.mark.parametrize("text", ["ours", "other"])
@pytest.mark.parametrize("before", [None, "the vendor's"])
def test_file_stays_when_only_its_path_spelling_changes(node, first, second, text, before):
    (node.root / "var/usrlocal/bin").mkdir(parents=True)
    (node.root / "usr/local").symlink_to("../var/usrlocal")
    if before is not None:
        (node.root / first).write_text(before)
    node.bring(storage=files(first))
    steps = node.bring(storage=files(second, text=text))
    assert node.seen(first) == node.seen(second) == ("-rw-r--r--", text)
    assert [step for step in steps if step.startswith(("keep", "remove", "restore"))] == []
    node.bring()
    assert node.seen(first) == (None if before is None else ("-rw-r--r--", before))


def test_link_replaced_by_directory_hides_its_former_files(node):
    links = [{"path": "/opt/l", "target": "d"}]
    node.bring(storage={**files("opt/d/x"), "links": links})
    node.bring(storage=files("opt/l/x", text="other"))
    assert node.seen("opt/d/x") is None
    assert node.seen("opt/l/x") == ("-rw-r--r--", "other")


@pytest.mark.parametrize("shadow", [None, "root:*:1::::::\n"])
def test_ssh_keys_are_set_without_shadow_entry(node, shadow):
    place = node.root / "etc/shadow"
    place.unlink()
    if shadow is not None:
        place.write_text(shadow)
    node.bring(passwd=core(sshAuthorizedKeys=["ssh-ed25519 AAAA"]))
    assert node.seen("home/core/.ssh/authorized_keys.d/ignition") == (
        "-rw-------",
        "ssh-ed25519 AAAA\n",
    )
    node.bring()
    assert node.seen("etc/shadow") == (None if shadow is None else ("-rw-r--r--", shadow))
