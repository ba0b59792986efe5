"""The preview of an update: differences, disruption and causes, without secrets."""

from dataclasses import asdict

import pytest
from hypothesis import given

from tests.api.configs import configs, ignition, with_files, with_units, with_users
from treenail.api.disruptionpolicy import DEFAULT_POLICY
from treenail.api.machineconfig import MachineConfig
from treenail.api.object_meta import ObjectMeta
from treenail.config.diff import compare_configs
from treenail.config.redact import FileDiff
from treenail.config.wanted_state import ParsedConfig, read_wanted_state
from treenail.update.impact.impact import DisruptionReason, compute_disruption
from treenail.update.impact.preview import (
    ChangeMark,
    ContentDiff,
    Preview,
    PreviewAction,
    PreviewEntry,
    preview_update,
)

CANARY = "Canary7Zq"
RULE = "no policy for this path"


def preview_config(old: MachineConfig, new: MachineConfig) -> Preview:
    return preview_update(ParsedConfig(old), ParsedConfig(new), DEFAULT_POLICY)


def config(document: object = None, name: str = "", **spec: object) -> MachineConfig:
    return MachineConfig(metadata=ObjectMeta(name=name), config=document or ignition(), **spec)


def test_preview_of_changed_file_has_difference_action_and_cause() -> None:
    old = config(with_files({"path": "/etc/a", "mode": 420, "contents": {"source": "data:,a"}}))
    new = config(with_files({"path": "/etc/a", "mode": 493, "contents": {"source": "data:,b"}}))
    assert preview_config(old, new) == Preview(
        old="",
        new="",
        entries=(
            PreviewEntry(
                "file",
                "/etc/a",
                ChangeMark.CHANGED,
                ("mode 0644 -> 0755",),
                (ContentDiff("/etc/a", FileDiff(("@@ -1,1 +1,1 @@", "-a", "+b"))),),
            ),
        ),
        actions=(
            PreviewAction("drain and reboot", (DisruptionReason("file /etc/a changed", RULE),)),
        ),
        needs_drain=True,
        needs_reboot=True,
    )


def test_preview_of_operating_system_uses_the_fields_of_the_config() -> None:
    old = config(kernel_arguments=("quiet", "a=1", "a=1"), extensions=("usbguard",))
    new = config(
        kernel_arguments=("a=1", "luks.passphrase=" + CANARY),
        kernel_type="realtime",
        extensions=("ipsec",),
        os_image_url="quay.example/os@sha256:" + "0" * 64,
    )
    assert [(entry.kind, entry.details) for entry in preview_config(old, new).entries] == [
        ("osImageURL", ("none -> quay.example/os@sha256:" + "0" * 64,)),
        ("kernelArguments", ("- quiet", "- a=1", "+ luks.passphrase=<withheld>")),
        ("kernelType", ("default -> realtime",)),
        (
            "extensions",
            (
                "- usbguard (usbguard)",
                "+ ipsec (NetworkManager-libreswan, libreswan, openvswitch3.5-ipsec)",
            ),
        ),
    ]


def test_preview_of_unit_has_its_state_and_each_of_its_files() -> None:
    old = config(with_units({"name": "a.service", "enabled": True, "contents": "[Unit]\n"}))
    new = config(
        with_units(
            {
                "name": "a.service",
                "enabled": False,
                "contents": "[Unit]\n",
                "dropins": [{"name": "10-b.conf", "contents": f"[X]\nY=TOKEN={CANARY}\n"}],
            },
            {"name": "b.service", "mask": True},
        )
    )
    dropin = "/etc/systemd/system/a.service.d/10-b.conf"
    shown = FileDiff(("@@ -0,0 +1,2 @@", "+[X]", "+Y=TOKEN=<withheld>"))
    assert preview_config(old, new).entries == (
        PreviewEntry(
            "unit", "a.service", ChangeMark.CHANGED, ("disabled",), (ContentDiff(dropin, shown),)
        ),
        PreviewEntry("unit", "b.service", ChangeMark.ADDED, ("masked",)),
    )


def test_preview_of_user_has_fingerprints_and_no_password() -> None:
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIP"
    old = config(with_users({"name": "core", "sshAuthorizedKeys": [f"{key} {CANARY}", CANARY]}))
    new = config(with_users({"name": "core", "passwordHash": f"$6$a${CANARY}"}))
    (entry,) = preview_config(old, new).entries
    assert entry == PreviewEntry(
        "user",
        "core",
        ChangeMark.CHANGED,
        (
            "- key ssh-ed25519 SHA256:xGib3+FptS+cITct2V7iFK9qKkm/QSPPdJstK0JtCps",
            "- key of unknown type",
            "password changed",
        ),
    )


ED25519 = "AAAAC3NzaC1lZDI1NTE5AAAAIK/XMkOO/2VgwbHkiI8goiGvIEj/RM/rvqxMlL0RTHcB"
FINGERPRINT = "ssh-ed25519 SHA256:CTbTJTfsKs+Xt+GpG5iaVNwaaJXDp3+IVo+HMVfi0pc"


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (f"ssh-ed25519 {ED25519}", FINGERPRINT),  # as ssh-keygen -l
        (f"ssh-ed25519\t{ED25519}\troot@vm", FINGERPRINT),
        (f"ssh-ed25519  {ED25519} a comment, é", FINGERPRINT),
        ("ssh-rsa AAA=", "ssh-rsa SHA256:lqKW0iTyhcZ77pPDD4owkVfw2qNdxbh+QQt4YwoJz8c"),
        ("ssh-rsa AAA", "ssh-rsa SHA256:lqKW0iTyhcZ77pPDD4owkVfw2qNdxbh+QQt4YwoJz8c"),
        # 4n + 1 characters, padding inside, no ASCII, another alphabet, nothing.
        ("ssh-rsa AAAAB", "of unknown type"),
        ("ssh-rsa AAA=AAAA", "of unknown type"),
        ("ssh-rsa AAAAé", "of unknown type"),
        ("ssh-rsa ÄÄÄÄ", "of unknown type"),
        ("ssh-rsa AA_A", "of unknown type"),
        ("ssh-rsa AA-A", "of unknown type"),
        ("ssh-rsa ====", "of unknown type"),
        ("ssh-rsa", "of unknown type"),
        ("ssh-rsé AAAA", "of unknown type"),
        ("", "of unknown type"),
    ],
)
def test_preview_of_any_key_has_its_fingerprint_or_none(key: str, text: str) -> None:
    new = config(with_users({"name": "core", "sshAuthorizedKeys": [key]}))
    (entry,) = preview_config(config(), new).entries
    assert entry.details == (f"+ key {text}",)


def test_preview_of_removed_certificate_says_that_it_stays() -> None:
    path = "/etc/docker/certs.d/registry.example/ca.crt"
    (entry,) = preview_config(config(with_files({"path": path})), config()).entries
    assert entry.details == ("stays on the node: certificates remain trusted",)


def test_preview_names_irreconcilable_changes() -> None:
    found = preview_config(config(), config(fips=True))
    assert [change.place for change in found.irreconcilable_changes] == ["spec.fips"]
    assert not found.is_empty


def test_preview_in_image_mode_omits_files_and_units() -> None:
    old = config(with_files({"path": "/etc/a"}), name="a")
    image = "quay.example/os@sha256:" + "1" * 64
    found = preview_update(
        ParsedConfig(old),
        ParsedConfig(config(name="b")),
        DEFAULT_POLICY,
        images=(image, image.replace("1", "2")),
    )
    assert [entry.kind for entry in found.entries] == ["osImageURL"]
    assert found.actions[0].reasons[0].source == "the image beside the config"


@given(configs())
def test_preview_of_a_config_with_itself_is_empty(document: dict[str, object]) -> None:
    assert preview_config(config(document), config(document)).is_empty


@given(configs(), configs())
def test_preview_has_the_disruption_that_the_agent_computes(
    old: dict[str, object], new: dict[str, object]
) -> None:
    found = compare_configs(read_wanted_state(config(old)), read_wanted_state(config(new)))
    preview, disruption = (
        preview_config(config(old), config(new)),
        compute_disruption(found, DEFAULT_POLICY),
    )
    assert (preview.needs_drain, preview.needs_reboot) == (
        disruption.needs_drain,
        disruption.needs_reboot,
    )
    assert len(preview.entries) == sum(
        map(len, (found.files, found.directories, found.links, found.units, found.users))
    )


def test_preview_withholds_the_secrets_of_all_fields() -> None:
    new = config(
        {
            "ignition": {"version": "3.4.0"},
            "passwd": {
                "users": [
                    {"name": "core", "passwordHash": CANARY, "sshAuthorizedKeys": [CANARY]},
                ]
            },
            "storage": {
                "files": [
                    {"path": "/etc/a", "mode": 384, "contents": {"source": f"data:,{CANARY}"}},
                    {"path": "/etc/b", "contents": {"source": f"data:,token={CANARY}"}},
                    {
                        "path": "/var/lib/kubelet/config.json",
                        "contents": {"source": f"data:,{CANARY}"},
                    },
                ],
                "luks": [
                    {
                        "name": "a",
                        "device": "/dev/a",
                        "keyFile": {"source": f"data:,{CANARY}"},
                    }
                ],
            },
            "systemd": {
                "units": [
                    {"name": "a.service", "contents": f"[Service]\nEnvironment=PASSWORD={CANARY}"}
                ]
            },
        },
        kernel_arguments=(f"password={CANARY}",),
    )
    found = preview_config(config(), new)
    assert len(found.entries) == 6
    assert CANARY not in str(asdict(found))
