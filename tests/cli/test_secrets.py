"""A canary in every place of a config that can hold a secret, and where it must not be found."""

import base64
import gzip
import json
import os
import stat
from pathlib import Path

import pytest

from tests.fakes.host_machine import make_machine
from treenail.api.machineconfig import MachineConfig
from treenail.cli.node.main import main
from treenail.config.wanted_state import read_wanted_state
from treenail.daemon.configuration.node_configuration import MachineInspector, apply_steps
from treenail.daemon.configuration.step_runner import StepRunner
from treenail.errors import StepError
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.root_directory import Root
from treenail.update.steps.plan import plan_steps

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")

CANARY = "Canary7e2b91"
BASE64 = base64.b64encode(CANARY.encode()).decode()
GZIP = base64.b64encode(gzip.compress(CANARY.encode())).decode()
# However it is quoted: as it is, or in the encoding that it had.
TRACES = (CANARY, BASE64[:12], GZIP[20:40], CANARY.encode().hex())


def data(text: str) -> str:
    return "data:;base64," + base64.b64encode(text.encode()).decode()


def file(source: object = None, path: str = "/etc/secret", **others: object) -> dict[str, object]:
    contents = {"source": source, **others}
    return {"storage": {"files": [{"path": path, "mode": 0o600, "contents": contents}]}}


def unit(**fields: object) -> dict[str, object]:
    return {"systemd": {"units": [{"name": "a.service", **fields}]}}


def user(**fields: object) -> dict[str, object]:
    return {"passwd": {"users": [{"name": "core", **fields}]}}


# What can be applied.
SECRETS = {
    "a file in base64": file(data(CANARY)),
    "a file in percent encoding": file(f"data:,{CANARY}"),
    "a compressed file": file(f"data:;base64,{GZIP}", compression="gzip"),
    "a pull secret": file(data(f'{{"auths":{{"q":{{"auth":"{CANARY}"}}}}}}'), "/etc/pull.json"),
    "a kubelet's pull secret": file(data(CANARY), "/var/lib/kubelet/config.json"),
    "a unit": unit(contents=f"[Service]\nEnvironment=PASSWORD={CANARY}\n"),
    "a drop-in": unit(
        dropins=[{"name": "a.conf", "contents": f"[Service]\nEnvironment=TOKEN={CANARY}\n"}]
    ),
    "a password": user(passwordHash=f"$6$salt${CANARY}"),
    "keys": user(sshAuthorizedKeys=[f"ssh-rsa AAAA{CANARY}"]),
    "another user's password": {"passwd": {"users": [{"name": "eve", "passwordHash": CANARY}]}},
}
# Rejected contents, which an error may quote.
REFUSED = {
    "base64 that is none": file(f"data:;base64,{CANARY}*"),
    "base64 that is cut": file(f"data:;base64,{CANARY}A"),
    "no comma": file(f"data:text/plain;{CANARY}"),
    "a wrong head": file(f"data:{CANARY} x;base64,AAAA"),
    "a wrong escape": file(f"data:,{CANARY}%zz"),
    "a wrong character": file(f"data:,{CANARY} <\u00e4>"),
    "half a character": file(f"data:,{CANARY}\ud800"),
    "no URL": file(CANARY),
    "another scheme": file(f"{CANARY}://host"),
    "a list as URL": file([CANARY]),
    "a user in a URL": file(f"https://me:{CANARY}@host/file"),
    "gzip that is none": file(data(CANARY), compression="gzip"),
    "gzip that is cut": file(f"data:;base64,{GZIP[:-8]}", compression="gzip"),
    "a name of a compression": file(data(CANARY), compression="xz"),
    "another digest": file(data(CANARY), verification={"hash": "sha256-" + "0" * 64}),
    "a header": file(
        "https://host/", httpHeaders=[{"name": "Authorization", "value": f"Bearer {CANARY}"}]
    ),
    "a wrong header": file("https://host/", httpHeaders=[CANARY]),
    "a list as unit": unit(contents=[CANARY]),
    "a list as drop-in": unit(dropins=[{"name": "a.conf", "contents": [CANARY]}]),
    "half a character in a unit": unit(contents=f"{CANARY}\ud800"),
    "a list as password": user(passwordHash=[CANARY]),
    "an object as password": user(passwordHash={CANARY: CANARY}),
    "a password with a colon": user(passwordHash=f"{CANARY}:0"),
    "one key as keys": user(sshAuthorizedKeys=CANARY),
    "lists as keys": user(sshAuthorizedKeys=[[CANARY]]),
    "a key twice": user(sshAuthorizedKeys=[CANARY, CANARY]),
    "a directory in its place": file(data(CANARY), "/etc/directory"),
}
# Contents that Ignition applies at the first boot only, or never: treenail skips them.
REMOTE = {
    "source": "https://host/x",
    "httpHeaders": [{"name": "Authorization", "value": f"Bearer {CANARY}"}],
}
FOREIGN = {
    "headers of a merged config": {"ignition": {"version": "3.4.0", "config": {"merge": [REMOTE]}}},
    "headers of a config instead": {
        "ignition": {"version": "3.4.0", "config": {"replace": REMOTE}}
    },
    "headers of an authority": {
        "ignition": {"version": "3.4.0", "security": {"tls": {"certificateAuthorities": [REMOTE]}}}
    },
    "a login at a proxy": {
        "ignition": {"version": "3.4.0", "proxy": {"httpsProxy": f"http://me:{CANARY}@proxy:1"}}
    },
    "the key of an encrypted disk": {
        "storage": {
            "luks": [{"name": "root", "device": "/dev/sda", "keyFile": {"source": data(CANARY)}}]
        }
    },
    "clevis with a secret": {
        "storage": {
            "luks": [
                {
                    "name": "root",
                    "device": "/dev/sda",
                    "clevis": {"custom": {"pin": "tang", "config": f'{{"password":"{CANARY}"}}'}},
                }
            ]
        }
    },
    "options of luks": {
        "storage": {
            "luks": [{"name": "root", "device": "/dev/sda", "options": [f"--key={CANARY}"]}]
        }
    },
    "the password of a group": {"passwd": {"groups": [{"name": "g", "passwordHash": CANARY}]}},
    "kernel arguments": {"kernelArguments": {"shouldExist": [f"luks.passphrase={CANARY}"]}},
}
# What is no document at all.
BROKEN = {
    "cut JSON": f'{{"ignition": {{"version": "3.4.0"}}, "passwd": "{CANARY}',
    "wrong JSON": f'{{"passwordHash": "{CANARY}" "{CANARY}"}}',
    "wrong YAML": f"passwordHash: '{CANARY}\n  x: {CANARY}: {CANARY}\n",
    "YAML with a tab": f"passwordHash:\n\t{CANARY}\n",
    "a tag": f"passwordHash: !{CANARY} x\n",
    "an alias": f"passwordHash: *{CANARY}\n",
    "a key twice": f"passwordHash: {CANARY}\npasswordHash: {CANARY}\n",
    "another kind": f"kind: Secret\ndata: {{password: {CANARY}}}\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    top = tmp_path / "root"
    for directory in ("etc/directory/x", "home/core", "var/lib/kubelet", "etc/systemd/system"):
        (top / directory).mkdir(parents=True)
    (top / "etc/passwd").write_text("core:x:1000:1000::/home/core:/bin/sh\n")
    (top / "etc/group").write_text("core:x:1000:\n")
    (top / "etc/shadow").write_text("core:*:1::::::\n")
    return top


def written(tmp_path: Path, name: str, sections: object) -> str:
    path = tmp_path / name
    if isinstance(sections, str):
        path.write_text(sections)
    else:
        assert isinstance(sections, dict)
        path.write_text(json.dumps({"ignition": {"version": "3.4.0"}, **sections}))
    return str(path)


def find_leaks(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> list[str]:
    """The traces of the canary in what was printed and logged."""
    captured = capsys.readouterr()
    everything = captured.out + captured.err + caplog.text
    return [trace for trace in TRACES if trace in everything]


def open_to_others(root: Path) -> list[str]:
    """Our own files that hold the canary and that others may read."""
    state = root / "var/lib/treenail"
    return [
        str(path)
        for path in state.rglob("*")
        if path.is_file()
        and any(trace.encode() in path.read_bytes() for trace in TRACES)
        and (stat.S_IMODE(path.stat().st_mode) != 0o600 or path.stat().st_uid != 0)
    ]


@pytest.mark.parametrize("name", SECRETS)
def test_output_hides_secret_files_when_applied_replaced_or_removed(
    tmp_path, root, capsys, caplog, name
):
    caplog.set_level("DEBUG")
    (root / "etc/secret").write_text(f"{CANARY} of the vendor\n")
    config = written(tmp_path, "config", SECRETS[name])
    empty = written(tmp_path, "empty", {})
    codes = {
        main([*command, *options])
        for options in ([], ["--json"])
        for command in (
            ["plan", empty, config],
            ["plan", config, empty],
            ["once", config, "--root", str(root)],
            ["once", config, "--root", str(root)],
            ["once", empty, "--root", str(root)],
        )
    }
    # 1 is a plan of what can't be done on a running node.
    assert codes <= {0, 1, 2, 3}
    assert find_leaks(capsys, caplog) == []
    assert open_to_others(root) == []


def test_output_hides_secret_kernel_arguments(tmp_path, root, capsys, caplog):
    document = {
        "kind": "MachineConfig",
        "spec": {"kernelArguments": [f"iscsi_password={CANARY} quiet"]},
    }
    config = written(tmp_path, "config", json.dumps(document))
    for options in ([], ["--json"]):
        assert main(["once", config, "--root", str(root), *options]) == 0
    assert find_leaks(capsys, caplog) == []


def test_output_hides_registry_credentials_and_url_tokens(tmp_path, root, capsys, caplog):
    caplog.set_level("DEBUG")
    links = [{"path": "/etc/link", "target": f"/srv/any?token={CANARY}"}]
    document = {
        "kind": "MachineConfig",
        "spec": {
            "osImageURL": f"me:{CANARY}@registry.example/os@sha256:{'0a' * 32}",
            "baseOSExtensionsContainerImage": f"me:{CANARY}@registry.example/extensions",
            "config": {"ignition": {"version": "3.4.0"}, "storage": {"links": links}},
        },
    }
    config = written(tmp_path, "config", json.dumps(document))
    empty = written(tmp_path, "empty", {})
    for options in ([], ["--json"]):
        main(["plan", empty, config, *options])
        main(["plan", config, empty, *options])
        assert main(["once", config, "--root", str(root), *options]) == 0
        (root / "etc/link").unlink()
        (root / "etc/link").symlink_to(f"/srv/other?token={CANARY}")
    assert main(["once", config, "--root", str(root)]) == 0
    assert find_leaks(capsys, caplog) == []
    assert str((root / "etc/link").readlink()) == f"/srv/any?token={CANARY}"


@pytest.mark.parametrize("name", REFUSED)
def test_errors_hide_rejected_secrets(tmp_path, root, capsys, caplog, name):
    caplog.set_level("DEBUG")
    config = written(tmp_path, "config", REFUSED[name])
    for options in ([], ["--json"]):
        assert main(["once", config, "--root", str(root), *options]) == 1
        main(["plan", written(tmp_path, "empty", {}), config, *options])
    assert find_leaks(capsys, caplog) == []
    assert open_to_others(root) == []


@pytest.mark.parametrize("name", FOREIGN)
def test_output_hides_secrets_of_other_programs(tmp_path, root, capsys, caplog, name):
    caplog.set_level("DEBUG")
    config = written(tmp_path, "config", FOREIGN[name])
    empty = written(tmp_path, "empty", {})
    for options in ([], ["--json"]):
        main(["once", config, "--root", str(root), *options])
        main(["plan", empty, config, *options])
        main(["plan", config, empty, *options])
    assert find_leaks(capsys, caplog) == []
    assert open_to_others(root) == []


@pytest.mark.parametrize("name", BROKEN)
def test_errors_hide_unparsable_documents(tmp_path, root, capsys, caplog, name):
    caplog.set_level("DEBUG")
    config = written(tmp_path, "config", BROKEN[name])
    assert main(["once", config, "--root", str(root)]) == 1
    assert main(["plan", config, config]) == 1
    assert find_leaks(capsys, caplog) == []


class Dying(Disk):
    """The process is killed when it syncs for the so-manieth time."""

    def __init__(self, syncs: int) -> None:
        super().__init__()
        self.syncs = syncs

    def fsync(self, descriptor: int) -> None:
        self.syncs -= 1
        if self.syncs < 0:
            raise KeyboardInterrupt
        super().fsync(descriptor)


def bring(root: Path, sections: object, disk: Disk) -> None:
    config = MachineConfig(config={"ignition": {"version": "3.4.0"}, **sections})  # type: ignore[dict-item]
    machine = make_machine(Root(root), disk)
    survey = MachineInspector(machine)
    wish = read_wanted_state(config)
    old = survey.read_ownership()
    apply_steps(
        plan_steps(old, wish, survey.inspect_machine(old, wish)).steps,
        StepRunner(machine),
    )


def test_files_after_kill_are_readable_by_root_only(root):
    """The undo log has the line of a password in it, and copies of files are kept beside it."""
    (root / "etc/shadow").write_text(f"core:{CANARY}old:1::::::\n")
    (root / "etc/shadow").chmod(0o600)
    (root / "etc/secret").write_text(f"{CANARY} of the vendor\n")
    (root / "etc/secret").chmod(0o600)
    sections = {**file(data(CANARY)), **user(passwordHash=CANARY, sshAuthorizedKeys=[CANARY])}
    logs = 0
    for syncs in range(60):
        try:
            bring(root, sections, Dying(syncs))
        except KeyboardInterrupt:
            holding = [
                path
                for path in root.rglob("*")
                if path.is_file() and not path.is_symlink() and CANARY in path.read_text()
            ]
            logs += any(path.name == "log" for path in holding)
            assert [p for p in holding if stat.S_IMODE(p.stat().st_mode) != 0o600] == [], syncs
            survey = StepRunner(make_machine(Root(root)))
            survey.undo.undo_changes()
            survey.undo.discard_log()
        else:
            break
    assert logs > 0


def test_errors_and_their_causes_hide_secrets(root):
    for name, sections in REFUSED.items():
        try:
            bring(root, sections, Disk())
        except Exception as error:  # noqa: BLE001 - the chain, whatever it is
            chain: BaseException | None = error
            while chain is not None:
                # The error of a decoder contains its input, but only our own errors are printed.
                if type(chain).__module__.startswith("treenail"):
                    assert not any(trace in f"{chain!r} {chain}" for trace in TRACES), name
                chain = chain.__cause__
        else:
            pytest.fail(f"{name} is not refused")


def test_repr_of_values_hides_secrets():
    for name, sections in SECRETS.items():
        document = {"ignition": {"version": "3.4.0"}, **sections}
        wish = read_wanted_state(MachineConfig(config=document))
        assert not any(trace in repr(wish) for trace in TRACES), name


def test_failed_step_error_hides_contents(root):
    with pytest.raises(StepError) as raised:
        bring(root, file(data(CANARY), "/etc/directory"), Disk())
    assert CANARY not in f"{raised.value!r} {raised.value.remedy}"
