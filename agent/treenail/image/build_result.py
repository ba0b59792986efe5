"""Result of one container of a build: the JSON in its termination message."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from treenail.api.decode import Fields, Json, load_json
from treenail.errors import ConfigError
from treenail.image.build_reason import BuildReason, RetryClass, classify_retry

EXIT_USER = 64
"""Exit code when the user's text or files are wrong: the Job ends at once."""
EXIT_EXTERNAL = 75
"""Exit code of every other failure: the Job may try again."""

LIMIT_BYTES = 4096
"""The kubelet truncates a longer termination message."""

_DIGEST = re.compile(r"sha256:[a-f0-9]{64}")
_MAX_PHASES = 16
_MAX_NAME = 32
_OMITTED = "\n…\n"


class BuildPhase(StrEnum):
    """The containers of a build, in their order."""

    FETCH = "fetch"
    BUILD = "build"
    PUSH = "push"


@dataclass(frozen=True, slots=True)
class BuildResult:
    """Report of one container of a build at its end."""

    phase: BuildPhase
    digest: str = ""
    """Manifest digest of the pushed image; empty unless ``push`` succeeded."""
    reason: BuildReason | None = None
    """None when the phase succeeded."""
    line: int = 0
    """Line of the composed Containerfile that failed, from 1; 0 for none."""
    message: str = ""
    """Cause and last output, without credentials; `to_json` shortens it in the middle."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by step: pull, build, push and others."""

    @property
    def has_succeeded(self) -> bool:
        return self.reason is None

    @property
    def exit_code(self) -> int:
        """Return the exit code of the container."""
        if self.reason is None:
            return 0
        is_user = classify_retry(self.reason) is RetryClass.USER
        return EXIT_USER if is_user else EXIT_EXTERNAL

    def to_json(self) -> str:
        """Return the JSON text of at most `LIMIT_BYTES` bytes of UTF-8."""
        text = self._encode(self.message)
        low, high = 0, len(self.message)
        if len(text.encode()) > LIMIT_BYTES:
            # The encoded length depends on each character, so search for the longest that fits.
            while low < high:
                middle = (low + high + 1) // 2
                if len(self._encode(_shorten(self.message, middle)).encode()) <= LIMIT_BYTES:
                    low = middle
                else:
                    high = middle - 1
            text = self._encode(_shorten(self.message, low))
        return text

    @classmethod
    def from_json(cls, text: str | bytes) -> "BuildResult":
        """Parse a termination message; raise `ConfigError` for anything else.

        A reason of a newer builder is an error too: a failure must not look like a success.
        """
        size = len(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        if size > LIMIT_BYTES:
            raise ConfigError(
                f"build result: expected at most {LIMIT_BYTES} bytes, found {size} bytes"
            )
        fields = Fields.from_json(load_json(text, where="build result"), "build result")
        digest = fields.get_text("digest")
        if digest and not _DIGEST.fullmatch(digest):
            raise fields.make_error("digest", "sha256: and 64 hex digits")
        line = fields.get_optional_integer("line") or 0
        if line < 0:
            raise fields.make_error("line", "a line number")
        reason = fields.get_text("reason")
        return cls(
            phase=BuildPhase(_check_member(fields, "phase", BuildPhase)),
            digest=digest,
            reason=BuildReason(_check_member(fields, "reason", BuildReason)) if reason else None,
            line=line,
            message=fields.get_text("message"),
            seconds=_read_seconds(fields.get_object("seconds")),
        )

    def _encode(self, message: str) -> str:
        document: Json = {
            "phase": self.phase.value,
            "digest": self.digest,
            "reason": self.reason.value if self.reason else "",
            "line": self.line,
            "message": message,
            "seconds": {
                name[:_MAX_NAME]: round(value, 3)
                for name, value in list(self.seconds.items())[:_MAX_PHASES]
            },
        }
        # Half a surrogate pair cannot be encoded as UTF-8; output of a program may contain one.
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace").decode()


def _shorten(text: str, length: int) -> str:
    """Return ``text`` with ``length`` characters: its first third and its end."""
    if length >= len(text):
        return text
    head = length // 3
    return text[:head] + _OMITTED + text[len(text) - (length - head) :]


def _check_member(fields: Fields, name: str, members: type[StrEnum]) -> str:
    value = fields.get_text(name)
    if value not in tuple(members):
        raise fields.error(
            f"{fields.path_of(name)}: expected {' or '.join(members)}, found {value!r:.60}"
        )
    return value


def _read_seconds(fields: Fields) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in list(fields.values.items())[:_MAX_PHASES]:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise fields.make_error(name, "a number of seconds")
        try:
            seconds = float(value)
        except OverflowError:  # an integer of JSON may have any size
            seconds = math.inf
        if not (math.isfinite(seconds) and seconds >= 0):
            raise fields.make_error(name, "a number of seconds")
        found[name[:_MAX_NAME]] = seconds
    return found
