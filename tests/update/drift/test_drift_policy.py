from treenail.config.drift import Drift, DriftAttribute, EntryKind
from treenail.update.drift.drift_policy import (
    HOUR_S,
    DriftAssessment,
    DriftPolicy,
    DriftReaction,
    assess_drift,
    format_drift,
    format_drift_remedy,
)

MOTD = Drift("/etc/motd", DriftAttribute.CONTENTS, "sha256:a", "sha256:b")
MODE = Drift("/etc/a/b", DriftAttribute.MODE, "0644", "0600")
EXTRA = Drift(
    "/etc/systemd/system/a.service.d/x.conf", DriftAttribute.KIND, EntryKind.NOTHING, EntryKind.FILE
)
UNIT = Drift("a.service", DriftAttribute.ENABLEMENT, "enabled", "disabled")
ARGUMENT = Drift("kernel command line", DriftAttribute.KERNEL_ARGUMENTS, "quiet", "nothing")
HEAL_ALL = DriftPolicy(paths=(("*", DriftReaction.REPAIR),))


def test_drift_blocks_unless_the_owner_says_otherwise():
    assert assess_drift([MOTD, UNIT], DriftPolicy(), {}, 0.0) == DriftAssessment(
        blocking=(MOTD, UNIT)
    )


def test_unknown_dropin_is_only_reported():
    assert assess_drift([EXTRA], DriftPolicy(), {}, 0.0) == DriftAssessment(reported=(EXTRA,))


def test_first_glob_that_matches_decides():
    policy = DriftPolicy(
        paths=(("/etc/motd", DriftReaction.REPORT), ("/etc/*", DriftReaction.REPAIR)),
    )

    assert assess_drift([MOTD, MODE], policy, {}, 0.0) == DriftAssessment(
        reported=(MOTD,), to_repair=(MODE,)
    )


def test_unit_is_matched_by_the_path_of_its_file():
    policy = DriftPolicy(paths=(("/etc/systemd/system/a.service", DriftReaction.REPAIR),))

    assert assess_drift([UNIT], policy, {}, 0.0) == DriftAssessment(to_repair=(UNIT,))


def test_what_only_a_boot_changes_is_not_healed():
    assert assess_drift([ARGUMENT], HEAL_ALL, {}, 0.0) == DriftAssessment(blocking=(ARGUMENT,))


def test_path_that_was_healed_often_enough_blocks_and_is_called_fought_over():
    heals = {"/etc/motd": (10.0, 20.0, 30.0)}

    assert assess_drift([MOTD], HEAL_ALL, heals, 40.0) == DriftAssessment(
        blocking=(MOTD,), contested=frozenset({"/etc/motd"})
    )


def test_an_hour_later_it_is_healed_again():
    heals = {"/etc/motd": (10.0, 20.0, 30.0)}

    assert assess_drift([MOTD], HEAL_ALL, heals, 10.0 + HOUR_S) == DriftAssessment(
        to_repair=(MOTD,)
    )


def test_sentence_names_the_first_few_and_counts_the_rest():
    told = format_drift([MOTD] * 7, "rendered-a")

    assert told.count("/etc/motd") == 5
    assert told.endswith("; and 2 more")


def test_remedy_fits_what_drifted():
    assert "touch /run/machine-config-daemon-force" in format_drift_remedy([ARGUMENT])
    assert format_drift_remedy([MOTD]).startswith(
        "have it put right with 'treenail drift --heal PATH'"
    )
    assert format_drift_remedy([MOTD], frozenset({"/etc/motd"})).startswith(
        "find what writes there"
    )
