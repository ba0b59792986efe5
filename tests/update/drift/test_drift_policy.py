from treenail.config.drift import Attribute, Drift, Kind
from treenail.update.drift.drift_policy import (
    HOUR_S,
    Drifted,
    DriftPolicy,
    Reaction,
    remedy,
    sentence,
    weigh,
)

MOTD = Drift("/etc/motd", Attribute.CONTENTS, "sha256:a", "sha256:b")
MODE = Drift("/etc/a/b", Attribute.MODE, "0644", "0600")
EXTRA = Drift("/etc/systemd/system/a.service.d/x.conf", Attribute.KIND, Kind.NOTHING, Kind.FILE)
UNIT = Drift("a.service", Attribute.ENABLEMENT, "enabled", "disabled")
ARGUMENT = Drift("kernel command line", Attribute.ARGUMENTS, "quiet", "nothing")
HEAL_ALL = DriftPolicy(paths=(("*", Reaction.HEAL),))


def test_drift_blocks_unless_the_owner_says_otherwise():
    assert weigh([MOTD, UNIT], DriftPolicy(), {}, 0.0) == Drifted(blocking=(MOTD, UNIT))


def test_unknown_dropin_is_only_reported():
    assert weigh([EXTRA], DriftPolicy(), {}, 0.0) == Drifted(reported=(EXTRA,))


def test_first_glob_that_matches_decides():
    policy = DriftPolicy(
        paths=(("/etc/motd", Reaction.REPORT), ("/etc/*", Reaction.HEAL)),
    )

    assert weigh([MOTD, MODE], policy, {}, 0.0) == Drifted(reported=(MOTD,), healed=(MODE,))


def test_unit_is_matched_by_the_path_of_its_file():
    policy = DriftPolicy(paths=(("/etc/systemd/system/a.service", Reaction.HEAL),))

    assert weigh([UNIT], policy, {}, 0.0) == Drifted(healed=(UNIT,))


def test_what_only_a_boot_changes_is_not_healed():
    assert weigh([ARGUMENT], HEAL_ALL, {}, 0.0) == Drifted(blocking=(ARGUMENT,))


def test_path_that_was_healed_often_enough_blocks_and_is_called_fought_over():
    heals = {"/etc/motd": (10.0, 20.0, 30.0)}

    assert weigh([MOTD], HEAL_ALL, heals, 40.0) == Drifted(
        blocking=(MOTD,), fought=frozenset({"/etc/motd"})
    )


def test_an_hour_later_it_is_healed_again():
    heals = {"/etc/motd": (10.0, 20.0, 30.0)}

    assert weigh([MOTD], HEAL_ALL, heals, 10.0 + HOUR_S) == Drifted(healed=(MOTD,))


def test_sentence_names_the_first_few_and_counts_the_rest():
    told = sentence([MOTD] * 7, "rendered-a")

    assert told.count("/etc/motd") == 5
    assert told.endswith("; and 2 more")


def test_remedy_fits_what_drifted():
    assert "touch /run/machine-config-daemon-force" in remedy([ARGUMENT])
    assert remedy([MOTD]).startswith("have it put right with 'treenail drift --heal PATH'")
    assert remedy([MOTD], frozenset({"/etc/motd"})).startswith("find what writes there")
