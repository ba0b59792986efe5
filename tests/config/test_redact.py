"""Tests of the redaction of text, documents and file diffs."""

import base64
import hashlib
import json
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures import canaries
from treenail.config import node_paths
from treenail.config.redact import (
    LINES_LIMIT,
    SIZE_LIMIT,
    FileDiff,
    compute_redacted_diff,
    format_redacted_lines,
    format_redacted_text,
    redact_json,
    redact_line,
    redact_text,
)
from treenail.log_bundle import find_secrets, list_forms

CANARY = "Canary7Zq"
LONG = "Canary7Zq" * 12
PEM = f"-----BEGIN RSA PRIVATE KEY-----\n{LONG}\n{CANARY}\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    "text",
    [
        f"password={CANARY}",
        f"db_password_file: {CANARY} {CANARY}",
        f'{{"auths": {{"a.example": {{"auth": "{CANARY}", "email": "a"}}}}}}',
        f'{{"auth":"{CANARY}\\"{CANARY}","x":1}}',
        f'{{"inner": "{{\\"auth\\":\\"{CANARY}\\"}}"}}',
        f"  token: {CANARY}",
        f"  token: |\n    {CANARY}\n    {CANARY}\n",
        f"tokens:\n- {CANARY}\n- {CANARY}\n",
        f'"credentials": {{\n  "of": "{CANARY}"\n}}',
        f'secret: "one\n {CANARY}"\nshown: yes',
        f"Environment=API_KEY={CANARY} \\\n  {CANARY}\n",
        f"client-key-data: {CANARY}",
        f"PrivateKey = {CANARY}=",
        f"PresharedKey={CANARY}=",
        f"psk={CANARY}",
        f': PSK "{CANARY}"',
        f"machine a.example login me password {CANARY}",
        f"Authorization: Digest {CANARY}",
        f"curl -H 'X-Any: Bearer {CANARY}abc'",
        f"HTTPS_PROXY=http://me:{CANARY}@proxy.example:3128",
        f"see https://store.example/blob?sig={CANARY}&x=1 for more",
        f"source: data:text/plain;charset=utf-8,{CANARY}",
        f"core:$6$salt${CANARY}:19000:0:99999:7:::",
        f"core:$y$j9T$salt${CANARY}:19000::::::",
        f"set root_hash grub.pbkdf2.sha512.10000.{CANARY}",
        f"x eyJhbGciOiJSUzI1NiJ9.{CANARY}.{CANARY}",
        f"sha256~{CANARY}abc",
        f"before\n{PEM}\nafter",
        json.dumps({"key": PEM}),
        f"-----BEGIN OpenVPN Static key V1-----\n{CANARY}",
        f"blob {base64.b64encode(LONG.encode() + b'1aB').decode().replace('=', '')}{CANARY}",
        "x" * (1 << 16) + CANARY,
        f"/usr/bin/podman login --username x --password {CANARY} registry.example",
        f"/usr/bin/podman login --password '{CANARY} {CANARY}' registry.example",
        f"/usr/bin/podman login --password={CANARY} registry.example",
        f"nmcli --wifi-password   {CANARY}",
        f"/usr/bin/any --token {CANARY} --verbose",
        f'"command": ["any", "--token", "{CANARY} {CANARY}", "-v"]',
        f'{{"command": "any --token \\"{CANARY} {CANARY}\\""}}',
        f"Nov 21 10:11:12 host podman[12]: login -u a --password {CANARY} registry.example",
        f"curl -u admin:{CANARY} https://store.example",
        f"curl -uadmin:{CANARY} https://store.example",
        f"curl -u 'admin:{CANARY} {CANARY}' https://store.example",
        f"curl --proxy-user admin:{CANARY} https://store.example",
        f"Environment=REGISTRY_PASS={CANARY}",
        f"Environment=MYSQL_PWD={CANARY} OTHER={CANARY}",
        f"bind_pw = {CANARY}",
        f"pass={CANARY}",
        f"quiet ip.pass={CANARY}",
        f'{{"pass": "{CANARY}"}}',
        f"pass:\n  {CANARY}",
        f"password {CANARY}",
        f"\tpassword\t\t{CANARY}",
        f"password          {CANARY}  ",
        f'password "{CANARY} {CANARY}"',
        f"requirepass {CANARY}",
        f"/bin/sh -c 'echo {CANARY} | passwd --stdin core'",
        f"echo -n core:{CANARY} | chpasswd",
        f"printf %s {CANARY} | podman login -u me --password-stdin registry.example",
        f"rocommunity {CANARY} 10.0.0.0/8",
        f"# requirepass {CANARY}",
        f"auth_pass {CANARY}",
        f"bind_pw {CANARY}",
        f"api_token {CANARY}",
        f"neighbor 10.0.0.1 password {CANARY}",
        f"got the token {CANARY}, which is old",
        f"<password>{CANARY}</password>",
        f'<ldap:bindPw kind="plain">{CANARY} {CANARY}</ldap:bindPw>',
        f"me:{CANARY}@registry.example/os@sha256:{'0a' * 32}",
        f"ostree-unverified-registry:me:{CANARY}@registry.example/os:1",
        f"/srv/any?token={CANARY}",
    ],
)
def test_secret_is_withheld_and_line_count_stays(text: str) -> None:
    shown = redact_text(text)
    assert CANARY not in shown
    assert shown.count("\n") == text.count("\n")
    assert redact_text(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "[main]\nkey = value\n# a comment: it has a colon",
        "ExecStart=/usr/bin/kubelet --config=/etc/kubernetes/kubelet.conf --node-ip=10.0.0.1",
        "PasswordAuthentication no",
        "authentication:\n  anonymous:\n    enabled: false",
        f"image: quay.example/os@sha256:{'0a' * 32}",
        f"image: quay.example:5000/os:1@sha256:{'0a' * 32}",
        f"ostree-unverified-registry:quay.example/os@sha256:{'0a' * 32}",
        "PermitEmptyPasswords no",
        "password    requisite   pam_pwquality.so retry=3",
        "password    [success=1 default=ignore] pam_unix.so",
        "sshd[12]: Failed password for core from 10.0.0.1 port 2200",
        "bypass=1",
        "proxy_pass http://backend;",
        "iommu.passthrough=1",
        "podman run -u 1000:1000 --user 0:0 image",
        "date -u +%H:%M",
        "journalctl -u kubelet.service",
        "<any>shown</any>",
        "echo shown | tee /run/shown",
        "Description=Refreshes the token of the node",
        "server 0.pool.example iburst",
        "-----BEGIN CERTIFICATE-----\n" + "Ab1/" * 16 + "\n-----END CERTIFICATE-----",
        "/usr/lib/systemd/system/" + "a-long-name-" * 9 + ".service",
    ],
)
def test_text_without_secrets_is_shown(text: str) -> None:
    assert redact_text(text) == text


@pytest.mark.parametrize(
    "piece",
    [
        *(
            "echo ",
            "echo |",
            "password ",
            "--token ",
            "-u a:",
            "<password ",
            "<token>",
            "a:",
            "pass=",
            "=a:b",
            " ",
        ),
        *("%3A", "-----BEGIN PRIVATE ", "QUJD", "abcdef.", "tn_a_"),
        *("\\", '\\"', '"', "'", "-", "token 'a", 'password="a\\', "password ( ", "eyJaaaaa."),
    ],
)
def test_long_line_is_redacted_quickly(piece: str) -> None:
    """A pattern with excessive backtracking would take hours; each head starts a match."""
    for head in ("", 'password=\\"', "--token \\", "<pw ", "-u "):
        redact_line((head + piece * (1 << 15))[: 1 << 15])


def test_line_of_many_addresses_is_redacted_quickly() -> None:
    began = time.process_time()
    for _ in range(5):
        redact_line("http://" * ((1 << 15) // 7))
    assert time.process_time() - began < 1.5  # 0.3 s; in square time 2.5 s


def test_secret_value_is_withheld_and_its_neighbours_are_shown() -> None:
    text = f'{{"user": "a", "password": "{CANARY}", "shell": "/bin/sh"}}'
    assert redact_line(text) == '{"user": "a", "password": <withheld>, "shell": "/bin/sh"}'


@pytest.mark.parametrize("prefix", ["", "Nov 21 10:11:12.000 host podman[12]: "])
@pytest.mark.parametrize("redact_all", [format_redacted_lines, format_redacted_text])
def test_secret_of_every_kind_is_withheld_in_every_form(
    redact_all: Callable[[str], bytes], prefix: str
) -> None:
    known = list_forms(set().union(*map(find_secrets, canaries.make_secret_files().values())))
    shown = redact_all(canaries.format_journal(prefix))
    for form in known:
        shown = shown.replace(form, b"")
    assert canaries.find_leaks(shown) == []
    # The lines beside the secrets are shown.
    count = len(canaries.SECRETS) * len(canaries.FORMS)
    assert shown.count(b"shown: the next step begins\n") == count


def test_secret_with_a_form_of_its_own_is_withheld_without_being_known() -> None:
    for kind in canaries.KNOWN_BY_FORM:
        for encode in canaries.FORMS.values():
            shown = format_redacted_lines(f"got {encode(canaries.SECRETS[kind])}")
            assert canaries.find_leaks(shown) == []


def test_secrets_of_a_file_are_its_passwords_and_not_its_names() -> None:
    assert find_secrets('{"auths": {"quay.example/team": {"auth": "bWU6Y2FuYXJ5Nw=="}}}') == {
        "bWU6Y2FuYXJ5Nw==",
        "me:canary7",
        "canary7",
    }
    assert find_secrets("spec: {pullSecret: {name: pull}}") == set()
    assert find_secrets("NO_PROXY=a.example\nHTTP_PROXY=http://proxy.example:3128") == set()


@given(st.text())
def test_any_text_keeps_its_line_count(text: str) -> None:
    shown = redact_text(text)
    assert shown.count("\n") == text.count("\n")
    assert redact_text(shown).count("\n") == text.count("\n")


def test_redacted_document_keeps_its_structure() -> None:
    document = {
        "passwd": {"users": [{"name": "core", "passwordHash": f"$6$a${CANARY}"}]},
        "storage": {
            "files": [
                {
                    "path": "/etc/a",
                    "mode": 420,
                    "contents": {
                        "source": f"data:,{CANARY}",
                        "httpHeaders": [{"name": "X-Any", "value": CANARY}],
                    },
                }
            ]
        },
        "systemd": {"units": [{"name": "a.service", "contents": f"[X]\nY=TOKEN={CANARY}\n"}]},
        "automountServiceAccountToken": True,
    }
    assert redact_json(document) == {
        "passwd": {"users": [{"name": "core", "passwordHash": "<withheld>"}]},
        "storage": {
            "files": [
                {
                    "path": "/etc/a",
                    "mode": 420,
                    "contents": {"source": "data:,<withheld>", "httpHeaders": "<withheld>"},
                }
            ]
        },
        "systemd": {"units": [{"name": "a.service", "contents": "[X]\nY=TOKEN=<withheld>\n"}]},
        "automountServiceAccountToken": True,
    }


def test_diff_has_three_lines_of_context() -> None:
    old = b"".join(b"line %d\n" % number for number in range(1, 10))
    new = old.replace(b"line 5\n", b"line five\n")
    assert compute_redacted_diff(old, new, path="/etc/a", mode=0o644) == FileDiff(
        (
            "@@ -2,7 +2,7 @@",
            " line 2",
            " line 3",
            " line 4",
            "-line 5",
            "+line five",
            " line 6",
            " line 7",
            " line 8",
        )
    )


def test_diff_of_new_or_removed_file_has_all_lines() -> None:
    content = b"one\ntwo\n"
    assert compute_redacted_diff(None, content, path="/etc/a", mode=0o644).lines == (
        "@@ -0,0 +1,2 @@",
        "+one",
        "+two",
    )
    assert compute_redacted_diff(content, None, path="/etc/a", mode=0o644).lines == (
        "@@ -1,2 +0,0 @@",
        "-one",
        "-two",
    )
    assert compute_redacted_diff(None, b"", path="/etc/a", mode=0o644) == FileDiff(
        note="nothing -> 0 bytes"
    )


def test_changed_secret_is_a_difference_without_its_value() -> None:
    old, new = b"user=a\npassword=Canary7Zq1\n", b"user=a\npassword=Canary7Zq2\n"
    assert compute_redacted_diff(old, new, path="/etc/a", mode=0o644).lines == (
        "@@ -1,2 +1,2 @@",
        " user=a",
        "-password=<withheld>",
        "+password=<withheld>",
    )


def test_key_that_begins_before_the_context_is_withheld() -> None:
    lines = [b"-----BEGIN PRIVATE KEY-----", *([b"Canary7Zq"] * 20), b"-----END PRIVATE KEY-----"]
    new = b"\n".join([*lines[:15], b"Canary7Zqx", *lines[15:]])
    shown = compute_redacted_diff(b"\n".join(lines), new, path="/etc/a", mode=0o644)
    assert CANARY not in str(shown)
    assert "+<withheld>" in shown.lines


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        *((path, 0o644) for path in sorted(node_paths.CREDENTIALS)),
        ("/etc/any", 0o600),
        ("/etc/any", 0o400),
        ("/etc/any", 0o640),
        ("/var/lib/kubelet/config.json", 0o644),
        ("/etc/kubernetes/kubeconfig", 0o644),
        ("/etc/ssl/private/a.key", 0o644),
        ("/etc/ssh/ssh_host_rsa_key", 0o644),
    ],
)
def test_contents_of_secret_file_are_withheld(path: str, mode: int) -> None:
    shown = compute_redacted_diff(CANARY.encode(), None, path=path, mode=mode)
    assert shown == FileDiff(note="contents withheld: 9 bytes -> nothing")


def test_binary_and_long_contents_show_digest_and_size() -> None:
    binary = b"\x1f\x8b\x08\x00\xff"
    digest = hashlib.sha256(binary).hexdigest()
    assert compute_redacted_diff(None, binary, path="/etc/a", mode=0o644) == FileDiff(
        note=f"binary: nothing -> 5 bytes, sha256:{digest}"
    )
    long = b"a" * (SIZE_LIMIT + 1)
    assert compute_redacted_diff(b"", long, path="/etc/a", mode=0o644).note.startswith(
        "long: 0 bytes"
    )


def test_diff_is_limited_in_lines_and_columns() -> None:
    many = b"".join(b"%d %s\n" % (number, b"x y" * 200) for number in range(LINES_LIMIT + 9))
    shown = compute_redacted_diff(None, many, path="/etc/a", mode=0o644)
    assert len(shown.lines) == LINES_LIMIT
    assert shown.note == "10 more lines"
    assert max(map(len, shown.lines)) == 300


def test_control_characters_do_not_reach_the_terminal() -> None:
    shown = compute_redacted_diff(None, b"a\x1b[2Jb\r\n", path="/etc/a", mode=0o644)
    assert shown.lines == ("@@ -0,0 +1,1 @@", "+a?[2Jb?")
