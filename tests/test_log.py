import io
import logging
import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures import canaries
from treenail import log as journal
from treenail.log import MessageId

CATALOG = Path(__file__).parents[1] / "systemd" / "treenail.catalog"
log = logging.getLogger("treenail.tests")


class Journald:
    """The receiving end of the journal's socket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start()

    def start(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(5)
        self._socket.bind(str(self.path))

    def stop(self, *, leaving_the_socket: bool = False) -> None:
        self._socket.close()
        if not leaving_the_socket:
            self.path.unlink(missing_ok=True)

    def receive(self) -> dict[str, str]:
        """The next record's fields; from a sealed memory file when it came as one."""
        content, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 20, 1)
        for descriptor in descriptors:
            assert content == b""
            with pytest.raises(PermissionError):
                os.pwrite(descriptor, b"x", 0)
            content = os.pread(descriptor, 1 << 24, 0)
            os.close(descriptor)
        return fields(content)


def fields(content: bytes) -> dict[str, str]:
    found: dict[str, str] = {}
    while content:
        line, _, content = content.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            size = int.from_bytes(content[:8], "little")
            value, content = content[8 : 8 + size], content[8 + size :]
            assert content[:1] == b"\n"
            content = content[1:]
        found[name.decode()] = value.decode()
    return found


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="tn", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def journald(directory: Path) -> Iterator[Journald]:
    daemon = Journald(directory / "socket")
    yield daemon
    daemon.stop()


@pytest.fixture
def stream(directory: Path) -> Iterator[io.StringIO]:
    text = io.StringIO()
    root = logging.getLogger()
    level = root.level
    journal.configure_logging(directory / "socket", level=logging.DEBUG, stream=text)
    yield text
    for handler in handlers():
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


def handlers() -> list[journal.JournalHandler]:
    found = logging.getLogger().handlers
    return [each for each in found if isinstance(each, journal.JournalHandler)]


def test_record_has_journal_fields(journald, stream):
    log.info("staged %s", "an image")
    received = journald.receive()
    assert int(received.pop("CODE_LINE")) > 0
    assert received == {
        "MESSAGE": "staged an image",
        "PRIORITY": "6",
        "SYSLOG_IDENTIFIER": "treenail",
        "CODE_FILE": __file__,
        "CODE_FUNC": "test_record_has_journal_fields",
    }
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("level", "priority"),
    [
        (logging.DEBUG, "7"),
        (logging.INFO, "6"),
        (logging.WARNING, "4"),
        (logging.ERROR, "3"),
        (logging.CRITICAL, "2"),
    ],
)
def test_level_is_mapped_to_syslog_priority(journald, stream, level, priority):
    log.log(level, "x")
    assert journald.receive()["PRIORITY"] == priority


def test_message_id_and_context_are_separate_fields(journald, stream):
    journal.set_log_context(update="u1", phase="staging", config="rendered-worker-a")
    log.info("staged", extra={"message_id": MessageId.STAGED})
    received = journald.receive()
    assert {name: value for name, value in received.items() if name.startswith("TREENAIL")} == {
        "TREENAIL_UPDATE": "u1",
        "TREENAIL_PHASE": "staging",
        "TREENAIL_CONFIG": "rendered-worker-a",
    }
    assert received["MESSAGE_ID"] == "136d74d26ce64c4ca1d1db48b1f10e2d"


def test_context_is_replaced_for_every_thread(journald, stream):
    journal.set_log_context(update="u1", phase="staging", config="a")
    journal.set_log_context(config="b")
    thread = threading.Thread(target=log.info, args=("from elsewhere",))
    thread.start()
    thread.join(timeout=5)
    received = journald.receive()
    assert {name: value for name, value in received.items() if name.startswith("TREENAIL")} == {
        "TREENAIL_CONFIG": "b"
    }


def test_multiline_message_adds_no_field(journald, stream):
    log.error("one\nPRIORITY=0\nthree=3")
    received = journald.receive()
    assert received["MESSAGE"] == "one\nPRIORITY=0\nthree=3"
    assert received["PRIORITY"] == "3"


def test_exception_adds_traceback_to_message(journald, stream):
    try:
        int("inside")
    except ValueError:
        log.exception("it failed")
    message = journald.receive()["MESSAGE"]
    assert message.startswith("it failed\nTraceback (most recent call last):")
    assert message.endswith("ValueError: invalid literal for int() with base 10: 'inside'")


def test_large_message_is_sent_in_memfd(journald, stream):
    log.info("%s", "x" * 3_000_000)
    assert journald.receive()["MESSAGE"] == "x" * 3_000_000
    assert stream.getvalue() == ""


def test_surrogates_are_escaped(journald, stream):
    log.info("file %s", b"\xff".decode("utf-8", "surrogateescape"))
    assert journald.receive()["MESSAGE"] == r"file \udcff"


def test_record_without_journal_goes_to_stream(stream):
    journal.set_log_context(phase="draining", update="u1")
    log.warning("waiting for %s", "a pod")
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ WARNING waiting for a pod "
        r"TREENAIL_UPDATE=u1 TREENAIL_PHASE=draining\n",
        stream.getvalue(),
    )


@pytest.mark.parametrize("leaving_the_socket", [True, False])
def test_restarted_journal_is_used_again(journald, stream, leaving_the_socket):
    log.info("one")
    assert journald.receive()["MESSAGE"] == "one"
    journald.stop(leaving_the_socket=leaving_the_socket)
    log.info("two")
    journald.path.unlink(missing_ok=True)
    journald.start()
    log.info("three")
    assert journald.receive()["MESSAGE"] == "three"
    assert stream.getvalue().endswith("INFO    two\n")
    assert stream.getvalue().count("\n") == 1


def test_blocked_journal_does_not_block_logging(journald, stream):
    queue = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text())
    for number in range(queue + 3):
        log.info("record %d", number)
    assert stream.getvalue().endswith(f"record {queue + 2}\n")
    assert journald.receive()["MESSAGE"] == "record 0"


def test_level_filters_records(directory, stream):
    journal.configure_logging(directory / "socket", level=logging.INFO, stream=stream)
    log.debug("small talk")
    log.info("news")
    assert stream.getvalue().endswith("INFO    news\n")
    assert stream.getvalue().count("\n") == 1


def test_second_configuration_replaces_first(directory, stream):
    second = io.StringIO()
    journal.configure_logging(directory / "socket", level=logging.INFO, stream=second)
    log.info("news")
    assert stream.getvalue() == ""
    assert second.getvalue().endswith("INFO    news\n")


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "arguments", [("%d", "x"), ("%s %s", "x"), ("%s", Unprintable())], ids=["type", "count", "str"]
)
def test_unformattable_record_is_reported(journald, stream, arguments):
    template, *values = arguments
    record = log.makeRecord("x", logging.INFO, "x.py", 1, template, tuple(values), None)
    (handler,) = handlers()
    handler.handle(record)
    message = journald.receive()["MESSAGE"]
    assert message == f"cannot format {template!r} with its arguments"


def test_closed_stream_is_ignored(stream):
    stream.close()
    log.info("no output is left")


def test_message_ids_are_valid_and_unique():
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in MessageId)
    assert len({str(each) for each in MessageId}) == len(MessageId.__members__)


def entries() -> dict[str, tuple[dict[str, str], str]]:
    """The catalog's entries by message id: headers and text."""
    found: dict[str, tuple[dict[str, str], str]] = {}
    for block in re.split(r"^-- ", CATALOG.read_text(), flags=re.MULTILINE)[1:]:
        identifier, _, rest = block.partition("\n")
        head, _, body = rest.partition("\n\n")
        headers = dict(line.split(": ", 1) for line in head.splitlines())
        found[identifier] = headers, body
    return found


def test_catalog_has_entry_with_cause_and_remedy_for_every_message():
    catalog = entries()
    assert list(catalog) == [str(each) for each in MessageId]
    for identifier, (headers, body) in catalog.items():
        name = MessageId(identifier).name
        assert headers["Defined-By"] == "treenail", name
        assert headers["Subject"], name
        assert headers["Documentation"] == "man:treenail(8)", name
        assert re.search("^Why: ", body, re.MULTILINE), name
        assert re.search("^What to do: ", body, re.MULTILINE), name


def test_catalog_uses_known_fields_only():
    known = {"@MESSAGE@", "@TREENAIL_UPDATE@", "@TREENAIL_PHASE@", "@TREENAIL_CONFIG@"}
    text = CATALOG.read_text()
    assert set(re.findall("@[A-Z_]+@", text)) <= known
    assert all(len(line) <= 100 for line in text.splitlines())


@pytest.mark.process
@pytest.mark.skipif(shutil.which("journalctl") is None, reason="there is no journalctl")
def test_journalctl_accepts_catalog(directory):
    place = directory / "usr/lib/systemd/catalog"
    place.mkdir(parents=True)
    (directory / "var/lib/systemd/catalog").mkdir(parents=True)
    shutil.copy(CATALOG, place)
    journalctl = ["journalctl", f"--root={directory}"]
    subprocess.run([*journalctl, "--update-catalog"], check=True, capture_output=True, timeout=30)
    listed = subprocess.run(
        [*journalctl, "--list-catalog"], check=True, capture_output=True, text=True, timeout=30
    )
    assert {line.split(" ", 1)[0] for line in listed.stdout.splitlines()} == set(MessageId)


def test_stream_lines_begin_with_their_priority() -> None:
    stream = io.StringIO()
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    try:
        journal.configure_stream_logging(stream, level=logging.INFO)
        logging.getLogger("a").warning("first\nsecond")
        logging.getLogger("a").debug("unseen")
    finally:
        for handler in root.handlers[:]:
            if handler not in before[1]:
                root.removeHandler(handler)
        root.setLevel(before[0])
    assert stream.getvalue() == "<4>first\n<4>second\n"


def test_log_shows_no_token_and_no_key(journald: Journald, stream: io.StringIO) -> None:
    for kind in canaries.KNOWN_BY_FORM:
        for encode in canaries.FORMS.values():
            text = encode(canaries.SECRETS[kind]).replace("\n", " ")
            log.warning("cannot send %s to %s", text, "registry.example")
            message = journald.receive()["MESSAGE"]
            assert message.startswith("cannot send ")
            assert canaries.find_leaks(message.encode()) == []
            record = logging.LogRecord("a", 30, "", 0, "sent %s", (text,), None)
            for formatter in (journal.LineFormatter(), journal._PriorityFormatter()):
                assert canaries.find_leaks(formatter.format(record).encode()) == []
