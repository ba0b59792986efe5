"""The composed Containerfile and its key: golden texts, and what changes the key."""

from dataclasses import replace
from typing import Any

import pytest

from treenail.image.build_inputs import (
    BuildInputs,
    compose_containerfile,
    compute_content_key,
    list_builder_options,
)
from treenail.image.containerfile import find_containerfile_problems, parse_containerfile

BASE = "registry.example.com/os/base@sha256:" + 64 * "a"
PACKAGES = "registry.example.com/os/extensions@sha256:" + 64 * "b"
USER = "FROM configs AS final\nRUN dnf install -y tree \\\n  && true\n"
INPUTS = BuildInputs(BASE, containerfile=USER)
FULL = BuildInputs(
    BASE,
    architecture="arm64",
    containerfile="# escape=`\nARG TOOLS=registry.example.com/tools:1\nFROM ${TOOLS} AS tools\n"
    "FROM configs AS final\nCOPY --from=tools /a /b",
    extensions=("usbguard", "kerberos"),
    extensions_image=PACKAGES,
    kernel_type="64k-pages",
    trust_bundle="-----BEGIN CERTIFICATE-----\n",
    config_digest="sha256:" + 64 * "c",
    context_digest="sha256:" + 64 * "d",
    mounts=("/etc/pki/entitlement",),
)

GOLDEN_FULL = f"""\
# escape=`
ARG TOOLS=registry.example.com/tools:1
FROM {BASE} AS configs
ADD .treenail-config.tar.gz /
COPY .treenail-trust-bundle.crt \
/etc/pki/ca-trust/source/anchors/openshift-config-user-ca-bundle.crt
RUN if command -v update-ca-trust >/dev/null; then update-ca-trust extract; fi
RUN --mount=type=bind,from={PACKAGES},source=/usr/share/rpm-ostree/extensions,\
target=/run/treenail-packages set -e; \
printf '[treenail-packages]\\nname=treenail-packages\\nbaseurl=file:///run/treenail-packages\\n\
enabled=1\\ngpgcheck=0\\n' > /etc/yum.repos.d/treenail-packages.repo; \
rpm-ostree override remove $(rpm -qa --qf '%{{NAME}} ' kernel kernel-core kernel-modules \
kernel-modules-core kernel-modules-extra) --install=kernel-64k-core \
--install=kernel-64k-modules --install=kernel-64k-modules-core \
--install=kernel-64k-modules-extra; \
rpm-ostree install --assumeyes krb5-workstation libkadm5 usbguard; \
rm /etc/yum.repos.d/treenail-packages.repo; ostree container commit
# The Containerfile of the MachineOSConfig:
{FULL.containerfile}
"""


def test_composed_text_is_stable() -> None:
    # Another text needs another BUILDER_CONTRACT, so that images are built again.
    found = compose_containerfile(FULL)
    assert found.text == GOLDEN_FULL
    assert found.files == (".treenail-config.tar.gz", ".treenail-trust-bundle.crt")
    assert found.user_line == 9


def test_content_keys_are_stable() -> None:
    assert compute_content_key(INPUTS) == "a6f9325e1ffb07f8"
    assert compute_content_key(FULL) == "c33e53e4befcc31a"


@pytest.mark.parametrize("inputs", [INPUTS, FULL])
def test_users_text_is_unchanged_at_the_end_with_its_lines(inputs: BuildInputs) -> None:
    found = compose_containerfile(inputs)
    assert found.text.rstrip("\n").endswith(inputs.containerfile.rstrip("\n"))
    composed = parse_containerfile(found.text)
    lines = [
        found.convert_line(each.line)
        for each in composed.instructions
        if found.convert_line(each.line)
    ]
    assert lines == [each.line for each in parse_containerfile(inputs.containerfile).instructions]
    assert found.convert_line(found.user_line - 1) == 0
    assert found.convert_line(found.user_line) == 1


@pytest.mark.parametrize("inputs", [INPUTS, FULL])
def test_composed_text_has_no_problem(inputs: BuildInputs) -> None:
    text = compose_containerfile(inputs).text
    assert find_containerfile_problems(text, stages=(), limit=100_000) == ()
    assert not any(part.heredocs for part in parse_containerfile(text).instructions)


def test_byte_order_mark_is_left_out() -> None:
    # buildah takes it for a part of the instruction anywhere but at the begin of a file.
    found = compose_containerfile(replace(INPUTS, containerfile="\ufeff" + USER))
    assert found == compose_containerfile(INPUTS)


def test_text_of_comments_alone_needs_no_job() -> None:
    inputs = BuildInputs(BASE, containerfile="# nothing\n", trust_bundle="x", kernel_type="")
    assert not inputs.needs_job
    assert compose_containerfile(inputs).user_line == 0
    assert compute_content_key(inputs) == compute_content_key(replace(inputs, containerfile=""))
    assert BuildInputs(BASE, extensions=("usbguard",)).needs_job
    assert BuildInputs(BASE, kernel_type="realtime").needs_job
    assert INPUTS.needs_job


@pytest.mark.parametrize(
    "change",
    [
        {"base_image": BASE.replace("a" * 64, "e" * 64)},
        {"architecture": "amd64"},
        {"containerfile": FULL.containerfile + "\n"},
        {"extensions": ("usbguard",)},
        {"extensions_image": PACKAGES.replace("b" * 64, "e" * 64)},
        {"kernel_type": "realtime"},
        {"trust_bundle": "x"},
        {"config_digest": ""},
        {"context_digest": "sha256:" + 64 * "e"},
        {"mounts": ()},
        {"options": list_builder_options(has_cache=True)},
        {"options": list_builder_options(driver="vfs")},
    ],
)
def test_each_input_changes_the_key(change: dict[str, Any]) -> None:
    assert compute_content_key(replace(FULL, **change)) != compute_content_key(FULL)


@pytest.mark.parametrize(
    "change",
    [
        {"base_image": BASE.replace("registry.example.com", "mirror:5000")},
        {"extensions": ("kerberos", "usbguard", "kerberos")},
    ],
)
def test_order_and_registry_do_not_change_the_key(change: dict[str, Any]) -> None:
    assert compute_content_key(replace(FULL, **change)) == compute_content_key(FULL)


def test_usual_options_of_the_builder_do_not_change_the_key() -> None:
    options = list_builder_options(driver="overlay", has_cache=False)
    assert compute_content_key(replace(FULL, options=options)) == compute_content_key(FULL)


def test_packages_without_use_do_not_change_the_key() -> None:
    assert compute_content_key(replace(INPUTS, extensions_image=PACKAGES)) == compute_content_key(
        INPUTS
    )


def test_key_of_several_architectures_ignores_their_order() -> None:
    arm = replace(INPUTS, architecture="arm64")
    assert compute_content_key(INPUTS, arm) == compute_content_key(arm, INPUTS)
    assert compute_content_key(INPUTS, arm) != compute_content_key(INPUTS)
