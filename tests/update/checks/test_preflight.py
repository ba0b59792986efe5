"""Each fault has its own reason, and unknown facts block nothing."""

from dataclasses import replace

import pytest

from tests.update.build import B
from treenail.api.pullspec import BOOTABLE_LABELS
from treenail.observations import (
    FilesystemSpace,
    ImageInspection,
    ImageLayer,
    InspectionProblem,
)
from treenail.update.checks.preflight import (
    PreflightFacts,
    UnreadableFilesystem,
    find_preflight_problems,
    make_preflight_error,
)
from treenail.update.checks.preflight_reason import PreflightReason
from treenail.update.checks.signature_policy import SignatureRule, SignatureTrust

GIB = 1024**3
BUILT = 1_700_000_000.0
BOOT = FilesystemSpace("/boot", 1, 900 * 1024**2, GIB, 60_000, 65_536)
SYSROOT = FilesystemSpace("/sysroot", 2, 60 * GIB, 100 * GIB, 5_000_000, 6_000_000)
VAR = FilesystemSpace("/var", 2, 60 * GIB, 100 * GIB, 5_000_000, 6_000_000)
LABELS = {BOOTABLE_LABELS[0]: "1"}
LAYERS = (ImageLayer("sha256:held", 5 * GIB), ImageLayer("sha256:new", GIB))

GOOD = PreflightFacts(
    now=BUILT + 100,
    image=B.image,
    inspection=ImageInspection("amd64", BUILT, LAYERS, LABELS),
    signature_rule=SignatureRule(SignatureTrust.UNSIGNED, "default"),
    architecture="amd64",
    spaces=(BOOT, SYSROOT, VAR),
    present_layers=frozenset({"sha256:held"}),
    kernel_bytes=120 * 1024**2,
    is_clock_synchronized=True,
)


def with_space(changed: FilesystemSpace | UnreadableFilesystem) -> PreflightFacts:
    others = {each.path: each for each in GOOD.spaces} | {changed.path: changed}
    return replace(GOOD, spaces=tuple(others.values()))


def registry(reason: PreflightReason) -> PreflightFacts:
    return replace(GOOD, inspection=InspectionProblem(reason, "the text of the registry"))


FAULTS: dict[PreflightReason, PreflightFacts] = {
    **{
        reason: registry(reason)
        for reason in (
            PreflightReason.REGISTRY_NAME_UNKNOWN,
            PreflightReason.REGISTRY_UNREACHABLE,
            PreflightReason.REGISTRY_UNTRUSTED,
            PreflightReason.REGISTRY_CERTIFICATE_EXPIRED,
            PreflightReason.REGISTRY_UNAUTHORIZED,
            PreflightReason.REGISTRY_FORBIDDEN,
            PreflightReason.REGISTRY_TIMEOUT,
            PreflightReason.REGISTRY_FAILED,
            PreflightReason.IMAGE_NOT_FOUND,
            PreflightReason.CLOCK_BEHIND_CERTIFICATE,
        )
    },
    PreflightReason.IMAGE_NOT_BOOTABLE: replace(
        GOOD, inspection=ImageInspection("amd64", BUILT, LAYERS)
    ),
    PreflightReason.WRONG_ARCHITECTURE: replace(
        GOOD, inspection=ImageInspection("arm64", BUILT, LAYERS, LABELS)
    ),
    PreflightReason.SIGNATURE_REJECTED: replace(
        GOOD, signature_rule=SignatureRule(SignatureTrust.REJECTED, "default")
    ),
    PreflightReason.SIGNATURE_KEY_MISSING: replace(
        GOOD,
        signature_rule=SignatureRule(SignatureTrust.SIGNED, "default", ("/etc/pki/k.pub",)),
        missing_keys=("/etc/pki/k.pub",),
    ),
    PreflightReason.SIGNATURE_POLICY_UNUSABLE: replace(
        GOOD, signature_rule="the policy is not JSON"
    ),
    PreflightReason.NO_SPACE_ON_BOOT: with_space(replace(BOOT, free_bytes=100 * 1024**2)),
    PreflightReason.NO_SPACE_ON_SYSROOT: with_space(replace(SYSROOT, device=3, free_bytes=4 * GIB)),
    PreflightReason.NO_SPACE_ON_VAR: with_space(replace(VAR, device=3, free_bytes=1024**2)),
    PreflightReason.NO_INODES_ON_BOOT: with_space(replace(BOOT, free_files=3)),
    PreflightReason.NO_INODES_ON_SYSROOT: with_space(replace(SYSROOT, device=3, free_files=500)),
    PreflightReason.NO_INODES_ON_VAR: with_space(replace(VAR, device=3, free_files=10)),
    PreflightReason.READ_ONLY_FILE_SYSTEM: with_space(replace(VAR, device=3, is_read_only=True)),
    PreflightReason.FILE_SYSTEM_FAILING: with_space(
        UnreadableFilesystem("/sysroot", "Input/output error")
    ),
    PreflightReason.LEDGER_NOT_WRITABLE: replace(GOOD, ledger_problem="No space left on device"),
    PreflightReason.STAGED_BY_OTHER: replace(GOOD, staged_by_other="os-1234"),
    PreflightReason.OTHER_UPDATE_DRIVER: replace(GOOD, drivers=("zincati.service",)),
    PreflightReason.SHUTDOWN_INHIBITED: replace(GOOD, inhibitors=("backup (process 7): copying",)),
    PreflightReason.CLOCK_BEHIND_IMAGE: replace(GOOD, now=BUILT - 7200),
    PreflightReason.AGENT_MISSING: replace(GOOD, lacks_agent=True),
}


def test_machine_without_faults_has_no_findings() -> None:
    assert find_preflight_problems(GOOD) == ()
    assert make_preflight_error(()) is None


@pytest.mark.parametrize("reason", FAULTS)
def test_each_fault_blocks_with_its_reason_and_a_remedy(reason: PreflightReason) -> None:
    (found,) = find_preflight_problems(FAULTS[reason])
    assert (found.reason, found.is_blocking) == (reason, True)
    assert found.remedy
    assert "{" not in found.message + found.remedy
    error = make_preflight_error((found,))
    assert (str(error), error.remedy) == (f"cannot start the update: {found}", found.remedy)
    assert error.reasons == (str(reason),)


def test_table_of_faults_has_every_blocking_reason() -> None:
    assert set(PreflightReason) - FAULTS.keys() == {PreflightReason.CLOCK_NOT_SYNCHRONIZED}
    assert len(FAULTS) >= 15


def test_unsynchronized_clock_is_reported_and_does_not_block() -> None:
    found = find_preflight_problems(replace(GOOD, is_clock_synchronized=False))
    assert [(each.reason, each.is_blocking) for each in found] == [
        (PreflightReason.CLOCK_NOT_SYNCHRONIZED, False)
    ]
    assert make_preflight_error(found) is None


def test_reason_set_to_warn_does_not_block_and_comes_last() -> None:
    facts = replace(GOOD, drivers=("zincati.service",), ledger_problem="full")
    found = find_preflight_problems(
        facts, only_warn=frozenset({PreflightReason.LEDGER_NOT_WRITABLE})
    )
    assert [(each.reason, each.is_blocking) for each in found] == [
        (PreflightReason.OTHER_UPDATE_DRIVER, True),
        (PreflightReason.LEDGER_NOT_WRITABLE, False),
    ]


def test_unknown_facts_block_nothing() -> None:
    assert find_preflight_problems(PreflightFacts(now=BUILT, image=B.image)) == ()


def test_update_without_image_ignores_registry_and_policy() -> None:
    facts = replace(GOOD, image="", inspection=None, signature_rule="not JSON")
    assert find_preflight_problems(facts) == ()


def test_stored_layers_need_no_space() -> None:
    facts = replace(
        with_space(replace(SYSROOT, device=3, free_bytes=GIB)),
        present_layers=frozenset(each.digest for each in LAYERS),
    )
    assert find_preflight_problems(facts) == ()


def test_paths_on_one_filesystem_share_its_space() -> None:
    # 2 GiB of files, 3 GiB that ostree keeps free, and the needs of /var.
    free = 5 * GIB + 10 * 1024**2
    shared = tuple(replace(each, free_bytes=free) for each in (SYSROOT, VAR))
    apart = (shared[0], replace(shared[1], device=3))
    assert find_preflight_problems(replace(GOOD, spaces=apart)) == ()
    (found,) = find_preflight_problems(replace(GOOD, spaces=shared))
    assert found.reason is PreflightReason.NO_SPACE_ON_VAR


def test_image_in_podman_storage_needs_space_twice() -> None:
    apart = with_space(replace(VAR, device=3, free_bytes=10 * GIB))
    assert find_preflight_problems(apart) == ()
    (found,) = find_preflight_problems(replace(apart, needs_storage=True))
    assert found.reason is PreflightReason.NO_SPACE_ON_VAR
    assert "needs 12352 MiB" in found.message


def test_space_of_older_deployments_on_boot_counts_as_free() -> None:
    full = with_space(replace(BOOT, free_bytes=100 * 1024**2))
    assert find_preflight_problems(replace(full, freeable_boot_bytes=120 * 1024**2)) == ()


def test_filesystem_without_fixed_inodes_never_lacks_inodes() -> None:
    assert find_preflight_problems(with_space(replace(SYSROOT, free_files=0, files=0))) == ()


def test_read_only_boot_partition_is_no_fault() -> None:
    assert find_preflight_problems(with_space(replace(BOOT, is_read_only=True))) == ()


def test_error_names_all_blocking_findings() -> None:
    facts = replace(FAULTS[PreflightReason.IMAGE_NOT_FOUND], drivers=("zincati.service",))
    error = make_preflight_error(find_preflight_problems(facts))
    assert error.reasons == ("OtherUpdateDriver", "ImageNotFound")
    assert "zincati.service" in str(error)
    assert "the text of the registry" in str(error)


def test_active_zincati_is_named_with_the_command_that_stops_it() -> None:
    found = find_preflight_problems(replace(GOOD, drivers=("zincati.service",)))
    error = make_preflight_error(found)
    assert "zincati.service is active and also updates this machine" in str(error)
    assert error.remedy == "run: systemctl disable --now zincati.service, or stop treenail"
