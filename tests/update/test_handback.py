"""What the Machine Config Daemon and its controllers have to find on the Node."""

import pytest

from tests.update.build import A, B, update
from treenail.api import annotations as key
from treenail.errors import UsageError
from treenail.update.handback import check_handback, compute_handback_annotations
from treenail.update.state.phases import Phase
from treenail.update.state.record import LedgerRecord, Target

LAYERED = Target("rendered-worker-a", "quay.example/os@sha256:" + "0" * 64)
PLAIN = Target("rendered-worker-a")


def test_node_that_nothing_is_known_of_or_that_is_being_updated_is_kept() -> None:
    with pytest.raises(UsageError, match="nothing to hand back"):
        check_handback(LedgerRecord())
    with pytest.raises(UsageError, match=r"an update to .* is under way \(draining\)"):
        check_handback(LedgerRecord(A, update(Phase.DRAINING, target=B)))
    check_handback(LedgerRecord(A))


def test_node_that_says_all_of_it_already_is_left_as_it_is() -> None:
    found = {
        key.CURRENT_CONFIG: PLAIN.config,
        key.DESIRED_CONFIG: PLAIN.config,
        key.STATE: "Done",
        key.REASON: "",
    }
    assert compute_handback_annotations(found, PLAIN) == {}


def test_image_is_handed_back_in_the_one_spelling_that_the_daemon_knows() -> None:
    found = {
        key.CURRENT_CONFIG: LAYERED.config,
        key.CURRENT_OS_IMAGE: LAYERED.image,
        key.DESIRED_OS_IMAGE: LAYERED.image,
        key.STATE: "Done",
        key.REASON: "",
    }
    assert compute_handback_annotations(found, LAYERED) == {
        key.CURRENT_IMAGE: LAYERED.image,
        key.DESIRED_IMAGE: LAYERED.image,
        key.CURRENT_OS_IMAGE: None,
        key.DESIRED_OS_IMAGE: None,
    }


def test_what_is_asked_for_in_the_daemons_spelling_stays_as_it_is_asked() -> None:
    newer = LAYERED.image.replace("0", "1")
    found = {key.DESIRED_IMAGE: newer, key.CURRENT_IMAGE: LAYERED.image}
    assert compute_handback_annotations(found, LAYERED) == {
        key.CURRENT_CONFIG: LAYERED.config,
        key.STATE: "Done",
        key.REASON: "",
    }


def test_node_without_an_image_has_no_image_annotation_afterwards() -> None:
    assert compute_handback_annotations({key.CURRENT_IMAGE: "x"}, PLAIN)[key.CURRENT_IMAGE] is None
