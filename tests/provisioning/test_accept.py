"""The Accept header of a request selects the Ignition version of the response."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api.fuzzing import fuzz
from tests.oracle import needs_oracle, records
from treenail.config.ignition.emit import VERSIONS_SERVED
from treenail.provisioning.server.service import DEFAULT_VERSION, AcceptError, choose_version

IGNITION = "application/vnd.coreos.ignition+json"


@needs_oracle
def test_version_is_chosen_as_recorded() -> None:
    found = records("accept_header")
    for record in found:
        if record["err"] is None:
            assert choose_version(record["accept"]) == record["version"]
        else:
            with pytest.raises(AcceptError):
                choose_version(record["accept"])
    assert len(found) == 11


@pytest.mark.parametrize(
    ("accept", "version"),
    [
        ("", "2.2.0"),
        ("*/*", "2.2.0"),
        ("text/plain;version=3.4.0", "2.2.0"),
        (f"{IGNITION};version=3.0.0", "3.0.0"),
        (f"{IGNITION};version=3.2.7", "3.2.0"),
        (f"{IGNITION};version=3.4.0-experimental", "3.3.0"),
        (f"{IGNITION};version=3.4.0+build", "3.4.0"),
        (f"{IGNITION};version=3.99.0, */*;q=0.1", "3.5.0"),
        (f"{IGNITION};version=2.99.0", "2.2.0"),
        (f'{IGNITION}; version="3.3.0"', "3.3.0"),
        ("Application/VND.coreos.ignition+JSON; Version=3.3.0", "3.3.0"),
        (f"{IGNITION};version=3.1.0;q=0.2, {IGNITION};version=3.4.0;q=0.9", "3.4.0"),
        (f"{IGNITION};version=3.1.0, {IGNITION};version=3.4.0", "3.1.0"),
        (f"{IGNITION};version=4.0.0, {IGNITION};version=3.4.0;q=0.5", "3.4.0"),
        (f"{IGNITION};version=1.0.0, {IGNITION};version=3.4.0;q=0.5", "3.4.0"),
        (f"{IGNITION};version=x;version=3.4.0", "3.4.0"),
        (f"{IGNITION};version=3.4.0;q=high", "3.4.0"),
        (f"{IGNITION};version=3", "2.2.0"),
        (f"{IGNITION};version={'9' * 8000}.0.0", "2.2.0"),
        (f"{IGNITION};version=\u0663.4.0", "2.2.0"),
        (f"{IGNITION},,;;=;,/", "2.2.0"),
    ],
)
def test_header_selects_the_newest_version_that_its_client_reads(accept: str, version: str) -> None:
    assert choose_version(accept) == version


@pytest.mark.parametrize(
    "version", ["0.1.0", "2.1.9", "2.2.0-rc1", "4.0.0-alpha", "4.0.0", "21.0.0"]
)
def test_version_outside_of_those_served_is_refused(version: str) -> None:
    with pytest.raises(AcceptError, match=r"cannot serve Ignition .*2\.2\.0, 3\.0\.0.*3\.5\.0$"):
        choose_version(f"{IGNITION};version={version}")


@fuzz
@given(
    st.lists(
        st.sampled_from(
            [IGNITION, "*/*", "version", "q", "=", ";", ",", "3.4.0", "0.5", "4.0.0", " "]
        )
        | st.text(max_size=8),
        max_size=30,
    )
)
def test_any_header_selects_a_version_or_is_refused(parts: list[str]) -> None:
    try:
        found = choose_version("".join(parts))
    except AcceptError as error:
        found = DEFAULT_VERSION if len(str(error)) < 200 else str(error)
    assert found in VERSIONS_SERVED
