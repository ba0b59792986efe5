"""The table of certificates by name: its format, its bounds, and how long a name stays taken."""

import base64
import json
import zlib
from dataclasses import replace
from typing import Any

import pytest

from treenail.errors import ConfigError
from treenail.provisioning.tokens import certificates
from treenail.provisioning.tokens.certificates import (
    LIFETIME_S,
    CertificateTable,
    IssuedCertificate,
    read_certificates,
    record_nodes,
    store_certificates,
)
from treenail.provisioning.tokens.tokens import (
    TokenTable,
    TokenTableParser,
    add_node,
    format_token_table,
    make_token,
)

NOW = 1_800_000_000.0
ROW = IssuedCertificate("worker-1.example", "abc234", "abc234", "0123456789-_", NOW + 3600)
BOUND = IssuedCertificate("worker-2", "worker/worker-2", "xyz789", "k" * 12, NOW + 7200)
TABLE = CertificateTable(NOW - 60, (ROW, BOUND))


def read_names(table: CertificateTable) -> list[str]:
    return [row.node for row in table.rows]


def encode(document: Any) -> TokenTable:
    packed = zlib.compress(json.dumps(document).encode())
    return TokenTable(certificates=base64.b64encode(packed).decode())


def format_document(**changes: Any) -> dict[str, Any]:
    return {"format": 1, "since": 5, "certificates": ["w1 abc abc  1900000000"], **changes}


def test_certificates_survive_the_secret_beside_the_tokens() -> None:
    _, record = make_token("worker", expires=NOW)
    table = store_certificates(TokenTable().put(record), TABLE)
    found = TokenTableParser("Secret").parse({"data": format_token_table(table)})
    assert found.tokens == {record.name: record}
    assert read_certificates(found, NOW) == TABLE
    # A server of an earlier version writes the key of the tokens only.
    assert format_token_table(table).keys() == {"tokens", "certificates"}
    assert format_token_table(TokenTable().put(record)).keys() == {"tokens"}


def test_certificates_outlive_their_tokens() -> None:
    _, record = make_token("worker", expires=NOW)
    table = store_certificates(TokenTable().put(record), TABLE)
    for without in (table.remove(record.name), table.prune(NOW + 1), table.keep(lambda _: False)):
        assert without.tokens == {}
        assert read_certificates(without, NOW) == TABLE


def test_certificate_ends_with_its_lifetime() -> None:
    table = store_certificates(TokenTable(), TABLE)
    assert read_names(read_certificates(table, NOW + 3600)) == ["worker-2"]
    assert read_names(read_certificates(table, NOW + 7200)) == []


def test_names_of_an_earlier_version_are_taken() -> None:
    _, record = make_token("worker", expires=NOW, uses=3)
    (row,) = read_certificates(TokenTable().put(add_node(record, "w1")), NOW).rows
    assert row == IssuedCertificate("w1", record.name, record.name, expires=NOW + LIFETIME_S)


@pytest.mark.parametrize(
    "document",
    [
        format_document(other=1),
        format_document(format=2),
        format_document(since="x"),
        format_document(since=1e300),
        format_document(certificates=["w1 abc abc  1 2"]),
        format_document(certificates=["W1 abc abc  1"]),
        format_document(certificates=["w1 abc abc  99999999999999"]),
        format_document(certificates=[["w1"]]),
        format_document(certificates=7),
        {"format": 1, "since": 5},
        [],
        "text",
    ],
)
def test_unknown_content_is_an_error_without_the_content(document: Any) -> None:
    with pytest.raises(ConfigError, match="cannot read the certificates") as caught:
        read_certificates(encode(document), NOW)
    assert "abc" not in str(caught.value)


def test_valid_document_is_read() -> None:
    assert read_names(read_certificates(encode(format_document()), NOW)) == ["w1"]


@pytest.mark.parametrize("text", ["=", "AAAA", base64.b64encode(b"x\x9c" * 9).decode()])
def test_damaged_content_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot read the certificates"):
        read_certificates(TokenTable(certificates=text), NOW)


def test_server_keeps_a_table_that_it_cannot_read() -> None:
    table = TokenTable(certificates="damaged")
    assert record_nodes(table, ["w1"], NOW) is table
    # Without the names of Nodes the table would claim to have them all.
    assert record_nodes(TokenTable(), None, NOW) == TokenTable()


def test_table_begins_with_the_first_names() -> None:
    table = record_nodes(TokenTable(), [], NOW)
    assert read_certificates(table, NOW) == CertificateTable(NOW)
    later = record_nodes(table, ["w1"], NOW + 60)
    found = read_certificates(later, NOW + 60)
    assert (found.since, read_names(found)) == (NOW, ["w1"])
    assert record_nodes(later, ["w1"], NOW + 120) is later


def test_name_of_a_node_stays_taken_for_a_lifetime_after_its_deletion() -> None:
    later = NOW + LIFETIME_S * 0.75
    table = CertificateTable(NOW).note_nodes(["w1", "w2"], NOW)
    seen = table.note_nodes(["w1"], later)
    assert [row.expires for row in seen.rows] == [later + LIFETIME_S, NOW + LIFETIME_S]
    deleted = table.note_nodes([], later, ["w2", "w3"])
    assert {row.node: row.expires for row in deleted.rows} == {
        "w1": NOW + LIFETIME_S,
        "w2": later + LIFETIME_S,
        "w3": later + LIFETIME_S,
    }
    # Its kubelet may have renewed a certificate that lasts a day.
    (row, _) = TABLE.note_nodes([], NOW, [ROW.node]).rows
    assert row == replace(ROW, expires=NOW + LIFETIME_S)


def test_number_of_certificates_is_bounded() -> None:
    rows = tuple(replace(ROW, node=f"w{number}") for number in range(certificates.MAX_CERTIFICATES))
    table = CertificateTable(NOW, rows)
    with pytest.raises(ConfigError, match="16000 are valid"):
        table.put(ROW)
    assert table.put(replace(rows[0], expires=NOW + 9)).rows[-1].expires == NOW + 9
    assert table.note_nodes(["a", "b"], NOW).rows == rows
    texts = ["w1 abc abc  1900000000"] * (certificates.MAX_CERTIFICATES + 1)
    with pytest.raises(ConfigError, match="cannot read"):
        read_certificates(encode(format_document(certificates=texts)), NOW)


def test_largest_table_fits_beside_ten_thousand_tokens() -> None:
    rows = tuple(
        IssuedCertificate(
            f"ip-10-{number // 250}-{number % 250}.eu-central-1.compute.internal",
            *(f"{number:06x}",) * 2,
            base64.urlsafe_b64encode(zlib.crc32(bytes([number % 251] * number)).to_bytes(9, "big"))
            .decode(),
            NOW + number,
        )
        for number in range(certificates.MAX_CERTIFICATES)
    )  # fmt: skip
    table = store_certificates(TokenTable(), CertificateTable(NOW, rows))
    assert len(table.certificates) < 700_000
    assert read_certificates(table, NOW - 1).rows == rows
