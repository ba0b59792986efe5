"""Comparison of a config with the content of an image."""

import hashlib
from dataclasses import replace

import pytest

from treenail.api.ignition.model import Contents
from treenail.config.image_content import (
    ImageContent,
    assume_provided,
    can_image_carry,
    compare_with_image,
    drop_provided,
    list_provided,
    make_missing_error,
)
from treenail.config.node_paths import KUBELET_CA, REGISTRY_CAS
from treenail.config.wanted_state import WantedFile, WantedLink, WantedState, WantedUnit, WantedUser
from treenail.observations import EntryKind, PathEntry

APP, UNIT = "/etc/app.conf", "app.service"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"
DROPIN_FILE = f"{UNIT_FILE}.d/10-a.conf"
TEXT = "[Install]\nWantedBy=multi-user.target\n"


def found(text: str, *, mode: int = 0o644, uid: int = 0) -> PathEntry:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return PathEntry(EntryKind.FILE, digest, mode, uid)


def wanted(*paths: str, unit: WantedUnit | None = None) -> WantedState:
    files = {path: WantedFile(path, Contents("data:,text")) for path in paths}
    return WantedState(files=files, units={} if unit is None else {unit.name: unit})


def test_same_file_is_provided() -> None:
    split = compare_with_image(wanted(APP), ImageContent({APP: found("text")}))
    assert (set(split.provided), split.missing) == ({APP}, ())


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (None, "/etc/app.conf is missing"),
        (found("other"), "/etc/app.conf has other contents"),
        (found("text", mode=0o600), "/etc/app.conf has mode 0600 instead of 0644"),
        (found("text", uid=5), "/etc/app.conf has user 5 instead of 0"),
        (PathEntry(EntryKind.DIRECTORY), "/etc/app.conf has kind directory instead of file"),
    ],
)
def test_other_file_is_missing(entry: PathEntry | None, text: str) -> None:
    split = compare_with_image(wanted(APP), ImageContent({} if entry is None else {APP: entry}))
    assert split.provided == set()
    error = make_missing_error("rendered-a", "quay.io/os", split.missing)
    assert text in str(error)
    assert "build the config into the image" in error.remedy


def test_control_characters_of_paths_are_escaped_in_the_error() -> None:
    path = "/etc/a\x1b]0;t\x07\n\u202eb"
    split = compare_with_image(wanted(path), ImageContent())
    error = make_missing_error("rendered-a", "quay.io/os", split.missing)
    escaped = r"/etc/a\u001b]0;t\u0007\n\u202eb"
    assert f"{escaped} is missing" in str(error)
    (drift,) = split.missing
    assert str(drift) == f"{escaped}: expected kind file, found nothing"


def test_missing_error_names_the_first_paths() -> None:
    paths = [f"/etc/{number}" for number in range(7)]
    split = compare_with_image(wanted(*paths), ImageContent())
    assert str(make_missing_error("a", "b", split.missing)).endswith(
        "/etc/4 is missing; and 2 more"
    )


@pytest.mark.parametrize(
    "path", ["/var/lib/a", "/run/a", "/home/core/a", "/root/a", "/boot/a", KUBELET_CA,
             f"{REGISTRY_CAS}/registry/ca.crt"],
)  # fmt: skip
def test_path_outside_images_is_left_to_the_agent(path: str) -> None:
    for split in (compare_with_image(wanted(path), ImageContent()), assume_provided(wanted(path))):
        assert not split.provided
        assert not split.missing


def test_link_into_var_is_left_to_the_agent() -> None:
    path = "/usr/local/bin/tool"
    assert can_image_carry(path)
    content = ImageContent(resolved_paths={path: "/var/usrlocal/bin/tool"})
    assert compare_with_image(wanted(path), content).missing == ()
    assert compare_with_image(wanted(path), ImageContent()).missing


def test_unit_below_usr_is_provided_and_not_wanted_below_etc() -> None:
    unit = WantedUnit(UNIT, TEXT, enabled=True, dropins={"10-a.conf": "[Unit]\n"})
    content = ImageContent(
        vendor_entries={UNIT_FILE: found(TEXT), DROPIN_FILE: found("[Unit]\n")},
        unit_states={UNIT: "enabled"},
    )
    split = compare_with_image(wanted(unit=unit), content)
    assert split.missing == ()
    assert split.provided == {UNIT, UNIT_FILE, DROPIN_FILE}
    assert split.wanted.units[UNIT] == replace(unit, contents="", dropins={"10-a.conf": ""})


def test_unit_below_usr_that_another_file_hides_is_missing() -> None:
    content = ImageContent({UNIT_FILE: found("other")}, vendor_entries={UNIT_FILE: found(TEXT)})
    split = compare_with_image(wanted(unit=WantedUnit(UNIT, TEXT)), content)
    assert [each.subject for each in split.missing] == [UNIT_FILE]
    assert split.wanted.units[UNIT].contents == TEXT


@pytest.mark.parametrize(
    ("unit", "state", "is_provided", "is_missing"),
    [
        (WantedUnit("a.service", enabled=True), "enabled", True, False),
        # The agent enables and disables units of the image.
        (WantedUnit("a.service", enabled=True), "disabled", False, False),
        (WantedUnit("a.service", enabled=False), "enabled", False, False),
        (WantedUnit("a.service"), "disabled", True, False),
        (WantedUnit("a.service", enabled=True), "masked", False, True),
        (WantedUnit("a.service", mask=False), "masked", False, True),
    ],
)
def test_enablement_of_a_unit_is_compared(
    unit: WantedUnit, state: str, *, is_provided: bool, is_missing: bool
) -> None:
    split = compare_with_image(wanted(unit=unit), ImageContent(unit_states={"a.service": state}))
    assert bool(split.missing) is is_missing
    assert (unit.name in split.provided) is is_provided


def test_enablement_of_a_unit_with_contents_is_missing() -> None:
    unit = WantedUnit(UNIT, TEXT, enabled=True)
    content = ImageContent({UNIT_FILE: found(TEXT)}, unit_states={UNIT: "disabled"})
    split = compare_with_image(wanted(unit=unit), content)
    assert [each.subject for each in split.missing] == [UNIT]


@pytest.mark.parametrize(
    "path",
    ["/etc/kubernetes/kubeconfig", "/etc/ostree/auth.json", "/etc/app/.docker/config.json"],
)
def test_login_is_left_to_the_agent(path: str) -> None:
    present = ImageContent({path: found("text")})
    for content in (ImageContent(), present):
        split = compare_with_image(wanted(path), content)
        assert (split.provided, split.missing) == (set(), ())
    assert not assume_provided(wanted(path)).provided


@pytest.mark.parametrize(("path", "is_missing"), [(APP, False), ("/usr/lib/app.conf", True)])
def test_named_owner_is_left_to_the_agent_where_it_can_write(
    path: str, *, is_missing: bool
) -> None:
    state = WantedState(files={path: WantedFile(path, Contents("data:,text"), user="app")})
    split = compare_with_image(state, ImageContent())
    assert (bool(split.missing), bool(split.provided)) == (is_missing, False)
    entry = replace(found("text", uid=990), user="app")
    assert compare_with_image(state, ImageContent({path: entry})).provided == {path}


def test_mask_below_usr_is_provided() -> None:
    path = "/etc/systemd/system/a.service"
    mask = PathEntry(EntryKind.LINK, target="/dev/null")
    content = ImageContent(vendor_entries={path: mask}, unit_states={"a.service": "masked"})
    split = compare_with_image(wanted(unit=WantedUnit("a.service", mask=True)), content)
    assert split.missing == ()
    assert split.wanted.units["a.service"].mask is None


def test_links_are_compared_by_target() -> None:
    state = WantedState(links={APP: WantedLink(APP, "b")})
    same = ImageContent({APP: PathEntry(EntryKind.LINK, target="b")})
    other = ImageContent({APP: PathEntry(EntryKind.LINK, target="c")})
    assert compare_with_image(state, same).provided == {APP}
    assert [each.subject for each in compare_with_image(state, other).missing] == [APP]


def test_dropped_content_leaves_users_and_the_rest() -> None:
    state = replace(
        wanted(APP, "/var/a", unit=WantedUnit(UNIT)), users={"core": WantedUser("core", ("key",))}
    )
    provided = assume_provided(state).provided
    assert list_provided(state, provided) == (APP, UNIT)
    left = drop_provided(state, provided)
    assert (list(left.files), list(left.units), list(left.users)) == (["/var/a"], [], ["core"])
