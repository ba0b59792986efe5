"""Each fault has a reason of its own, and what can't be told holds nothing up."""

from dataclasses import replace

import pytest

from tests.update.build import B
from treenail.update.checks.preflight import (
    Conditions,
    Layer,
    Manifest,
    Reason,
    Space,
    Trouble,
    Unreadable,
    findings,
    refusal,
)
from treenail.update.checks.signature_policy import Rule, Trust

GIB = 1024**3
BUILT = 1_700_000_000.0
BOOT = Space("/boot", 1, 900 * 1024**2, GIB, 60_000, 65_536)
SYSROOT = Space("/sysroot", 2, 60 * GIB, 100 * GIB, 5_000_000, 6_000_000)
VAR = Space("/var", 2, 60 * GIB, 100 * GIB, 5_000_000, 6_000_000)
LAYERS = (Layer("sha256:held", 5 * GIB), Layer("sha256:new", GIB))

GOOD = Conditions(
    now=BUILT + 100,
    image=B.image,
    manifest=Manifest("amd64", BUILT, LAYERS),
    rule=Rule(Trust.UNSIGNED, "default"),
    architecture="amd64",
    spaces=(BOOT, SYSROOT, VAR),
    held_layers=frozenset({"sha256:held"}),
    kernel_bytes=120 * 1024**2,
    synchronized=True,
)


def with_space(changed: Space | Unreadable) -> Conditions:
    others = {each.path: each for each in GOOD.spaces} | {changed.path: changed}
    return replace(GOOD, spaces=tuple(others.values()))


def registry(reason: Reason) -> Conditions:
    return replace(GOOD, manifest=Trouble(reason, "the registry's own words"))


FAULTS: dict[Reason, Conditions] = {
    **{
        reason: registry(reason)
        for reason in (
            Reason.REGISTRY_NAME_UNKNOWN,
            Reason.REGISTRY_UNREACHABLE,
            Reason.REGISTRY_UNTRUSTED,
            Reason.REGISTRY_CERTIFICATE_EXPIRED,
            Reason.REGISTRY_UNAUTHORIZED,
            Reason.REGISTRY_FORBIDDEN,
            Reason.REGISTRY_TIMEOUT,
            Reason.REGISTRY_FAILED,
            Reason.IMAGE_NOT_FOUND,
            Reason.CLOCK_BEHIND_CERTIFICATE,
        )
    },
    Reason.IMAGE_NOT_BOOTABLE: replace(
        GOOD, manifest=Manifest("amd64", BUILT, LAYERS, bootable=False)
    ),
    Reason.WRONG_ARCHITECTURE: replace(GOOD, manifest=Manifest("arm64", BUILT, LAYERS)),
    Reason.SIGNATURE_REJECTED: replace(GOOD, rule=Rule(Trust.REJECTED, "default")),
    Reason.SIGNATURE_KEY_MISSING: replace(
        GOOD,
        rule=Rule(Trust.SIGNED, "default", ("/etc/pki/k.pub",)),
        missing_keys=("/etc/pki/k.pub",),
    ),
    Reason.SIGNATURE_POLICY_UNUSABLE: replace(GOOD, rule="the policy is not JSON"),
    Reason.NO_SPACE_ON_BOOT: with_space(replace(BOOT, free_bytes=100 * 1024**2)),
    Reason.NO_SPACE_ON_SYSROOT: with_space(replace(SYSROOT, device=3, free_bytes=4 * GIB)),
    Reason.NO_SPACE_ON_VAR: with_space(replace(VAR, device=3, free_bytes=1024**2)),
    Reason.NO_INODES_ON_BOOT: with_space(replace(BOOT, free_files=3)),
    Reason.NO_INODES_ON_SYSROOT: with_space(replace(SYSROOT, device=3, free_files=500)),
    Reason.NO_INODES_ON_VAR: with_space(replace(VAR, device=3, free_files=10)),
    Reason.READ_ONLY_FILE_SYSTEM: with_space(replace(VAR, device=3, read_only=True)),
    Reason.FILE_SYSTEM_FAILING: with_space(Unreadable("/sysroot", "Input/output error")),
    Reason.LEDGER_NOT_WRITABLE: replace(GOOD, ledger_problem="No space left on device"),
    Reason.STAGED_BY_OTHER: replace(GOOD, staged_by_other="os-1234"),
    Reason.OTHER_UPDATE_DRIVER: replace(GOOD, drivers=("zincati.service",)),
    Reason.SHUTDOWN_INHIBITED: replace(GOOD, inhibitors=("backup (process 7): copying",)),
    Reason.CLOCK_BEHIND_IMAGE: replace(GOOD, now=BUILT - 7200),
}


def test_a_machine_that_is_fit_has_no_findings() -> None:
    assert findings(GOOD) == ()
    assert refusal(()) is None


@pytest.mark.parametrize("reason", FAULTS)
def test_each_fault_blocks_for_its_own_reason_and_says_what_to_do(reason: Reason) -> None:
    (found,) = findings(FAULTS[reason])
    assert (found.reason, found.blocks) == (reason, True)
    assert found.remedy
    assert "{" not in found.sentence + found.remedy
    error = refusal((found,))
    assert error is not None
    assert (str(error), error.remedy) == (f"the update can't begin: {found}", found.remedy)
    assert error.reasons == (str(reason),)


def test_every_reason_that_blocks_is_in_the_table() -> None:
    assert set(Reason) - FAULTS.keys() == {Reason.CLOCK_NOT_SYNCHRONIZED}
    assert len(FAULTS) >= 15


def test_a_clock_that_follows_nobody_is_said_and_blocks_nothing() -> None:
    found = findings(replace(GOOD, synchronized=False))
    assert [(each.reason, each.blocks) for each in found] == [
        (Reason.CLOCK_NOT_SYNCHRONIZED, False)
    ]
    assert refusal(found) is None


def test_a_reason_that_is_only_to_warn_blocks_nothing_and_comes_last() -> None:
    conditions = replace(GOOD, drivers=("zincati.service",), ledger_problem="full")
    found = findings(conditions, only_warn=frozenset({Reason.LEDGER_NOT_WRITABLE}))
    assert [(each.reason, each.blocks) for each in found] == [
        (Reason.OTHER_UPDATE_DRIVER, True),
        (Reason.LEDGER_NOT_WRITABLE, False),
    ]


def test_what_cannot_be_told_blocks_nothing() -> None:
    assert findings(Conditions(now=BUILT, image=B.image)) == ()


def test_without_an_image_nothing_is_asked_of_registry_and_policy() -> None:
    conditions = replace(GOOD, image="", manifest=None, rule="not JSON")
    assert findings(conditions) == ()


def test_layers_that_are_there_need_no_room() -> None:
    conditions = replace(
        with_space(replace(SYSROOT, device=3, free_bytes=GIB)),
        held_layers=frozenset(each.digest for each in LAYERS),
    )
    assert findings(conditions) == ()


def test_paths_on_one_file_system_share_its_room() -> None:
    # 2 GiB of files, 3 GiB that ostree keeps free, and what /var needs.
    tight = 5 * GIB + 10 * 1024**2
    shared = tuple(replace(each, free_bytes=tight) for each in (SYSROOT, VAR))
    apart = (shared[0], replace(shared[1], device=3))
    assert findings(replace(GOOD, spaces=apart)) == ()
    (found,) = findings(replace(GOOD, spaces=shared))
    assert found.reason is Reason.NO_SPACE_ON_VAR


def test_an_image_that_waits_in_storage_is_on_disk_twice() -> None:
    apart = with_space(replace(VAR, device=3, free_bytes=10 * GIB))
    assert findings(apart) == ()
    (found,) = findings(replace(apart, stores=True))
    assert found.reason is Reason.NO_SPACE_ON_VAR
    assert "needs 12352 MiB there" in found.sentence


def test_older_deployments_make_room_on_the_boot_partition() -> None:
    full = with_space(replace(BOOT, free_bytes=100 * 1024**2))
    assert findings(replace(full, freeable_boot_bytes=120 * 1024**2)) == ()


def test_a_file_system_without_a_fixed_number_of_inodes_never_lacks_any() -> None:
    assert findings(with_space(replace(SYSROOT, free_files=0, files=0))) == ()


def test_a_boot_partition_mounted_read_only_is_as_it_should_be() -> None:
    assert findings(with_space(replace(BOOT, read_only=True))) == ()


def test_all_that_blocks_is_said_at_once() -> None:
    conditions = replace(FAULTS[Reason.IMAGE_NOT_FOUND], drivers=("zincati.service",))
    error = refusal(findings(conditions))
    assert error is not None
    assert error.reasons == ("OtherUpdateDriver", "ImageNotFound")
    assert "zincati.service" in str(error)
    assert "the registry's own words" in str(error)
