"""Outputs of buildah 1.28.2, recorded: exit code, lines, and the reason that they mean."""

from dataclasses import dataclass

from treenail.image.build_result import BuildReason


@dataclass(frozen=True, slots=True)
class RecordedFailure:
    name: str
    code: int
    lines: tuple[str, ...]
    reason: BuildReason
    cause: str


def _record(name: str, code: int, text: str, reason: BuildReason, cause: str) -> RecordedFailure:
    return RecordedFailure(name, code, tuple(text.strip().splitlines()), reason, cause)


FAILURES = (
    _record(
        "unknown-instruction",
        125,
        """
STEP 1/2: FROM localhost/base AS configs
STEP 2/2: FOO bar
time="2026-11-22T16:06:12Z" level=error msg="+(UNHANDLED LOGLEVEL) &imagebuilder.Step{Env:[]}"
Error: building at STEP "FOO ": Build error: Unknown instruction: "FOO" &imagebuilder.Step{Env:[]}
""",
        BuildReason.CONTAINERFILE_INVALID,
        'Unknown instruction: "FOO"',
    ),
    _record(
        "run-without-command",
        2,
        """
STEP 2/2: RUN
/bin/sh: -c requires an argument
subprocess exited with status 2
subprocess exited with status 2
Error: building at STEP "RUN ": exit status 2
""",
        BuildReason.INSTRUCTION_FAILED,
        "exit status 2",
    ),
    _record(
        "run-fails",
        1,
        """
STEP 3/3: RUN cat /missing
cat: can't open '/missing': No such file or directory
subprocess exited with status 1
subprocess exited with status 1
Error: building at STEP "RUN cat /missing": exit status 1
""",
        BuildReason.INSTRUCTION_FAILED,
        "RUN cat /missing: exit status 1",
    ),
    _record(
        "run-killed",
        1,
        """
STEP 2/2: RUN kill -9 $$
subprocess exited on killed
subprocess exited with status 1
Error: building at STEP "RUN kill -9 $$": exit status 1
""",
        BuildReason.INSTRUCTION_FAILED,
        "the command was killed by a signal",
    ),
    _record(
        "copy-of-a-missing-file",
        125,
        """
STEP 2/2: COPY nofile /x
Error: building at STEP "COPY nofile /x": checking on sources under "/ctx": copier: stat: \
"/nofile": no such file or directory
""",
        BuildReason.INSTRUCTION_FAILED,
        '"/nofile": no such file or directory',
    ),
    _record(
        "copy-from-an-unknown-stage",
        125,
        """
STEP 2/2: COPY --from=nostage /a /x
Error: COPY --from=nostage: no stage or image found with that name
""",
        BuildReason.CONTAINERFILE_INVALID,
        "no stage or image found",
    ),
    _record(
        "unknown-base",
        125,
        """
STEP 1/2: FROM reg.example/other:1
Error: creating build container: reg.example/other:1: image not known
""",
        BuildReason.BASE_NOT_FOUND,
        "reg.example/other:1: image not known",
    ),
    _record(
        "here-document",
        125,
        """
STEP 2/4: RUN <<EOF
STEP 3/4: echo a
Error: building at STEP "ECHO ": Build error: Unknown instruction: "ECHO" &imagebuilder.Step{}
""",
        BuildReason.CONTAINERFILE_INVALID,
        "buildah 1.33",
    ),
    _record(
        "no-from", 125, "Error: no FROM statement found", BuildReason.CONTAINERFILE_INVALID, "FROM"
    ),
    _record(
        "empty", 125, 'Error: no contents in "cf"', BuildReason.CONTAINERFILE_INVALID, "no contents"
    ),
    _record(
        "unknown-flag",
        125,
        'Error: building at STEP "RUN --nonsense=1 true": RUN only supports the --mount flag',
        BuildReason.CONTAINERFILE_INVALID,
        "RUN only supports",
    ),
    _record(
        "unknown-user",
        125,
        """
STEP 3/3: RUN true
Error: building at STEP "RUN true": determining run uid: user: unknown user error looking up \
user "nosuch"
""",
        BuildReason.INSTRUCTION_FAILED,
        'user "nosuch"',
    ),
    _record(
        "malformed-env",
        125,
        "Error: parsing main Dockerfile: cf: ENV must have two arguments",
        BuildReason.CONTAINERFILE_INVALID,
        "ENV must have two arguments",
    ),
    _record(
        "add-from-an-unknown-host",
        125,
        """
STEP 2/2: ADD http://nosuch.invalid/x /x
Error: building at STEP "ADD http://nosuch.invalid/x /x": reading "http://nosuch.invalid/x": Get \
"http://nosuch.invalid/x": dial tcp: lookup nosuch.invalid on 192.0.2.53:53: no such host
""",
        BuildReason.INSTRUCTION_FAILED,
        "no such host",
    ),
    _record(
        "healthcheck-flag",
        125,
        'Error: building at STEP "HEALTHCHECK --x CMD a": flag provided but not defined: -x',
        BuildReason.CONTAINERFILE_INVALID,
        "flag provided",
    ),
    _record(
        "run-fills-the-disk",
        1,
        """
STEP 2/2: RUN dd if=/dev/zero of=/big bs=1M count=100
dd: error writing '/big': No space left on device
19+0 records in
18+0 records out
subprocess exited with status 1
subprocess exited with status 1
time="2026-11-22T16:06:26Z" level=error msg="error unmounting container: unmounting build \
container \\"0079\\": write /build/run/overlay-layers/.tmp: no space left on device"
Error: building at STEP "RUN dd if=/dev/zero of=/big bs=1M count=100": exit status 1
""",
        BuildReason.DISK_FULL,
        "no space left on the builder's disk",
    ),
    _record(
        "commit-fills-the-disk",
        1,
        """
COMMIT out
Copying blob sha256:ed011822198759bcdcb7d02c6eaf3cea62f3b51c0125f66a7ae756dc650f9f51
Error: committing container for step {Env:[] Command:run}: copying layers and metadata for \
container "5893": writing blob: adding layer with blob "sha256:ed01": processing tar file(write \
/big: no space left on device): exit status 1
""",
        BuildReason.DISK_FULL,
        "no space left on the builder's disk",
    ),
    _record("killed", 137, "STEP 2/2: RUN make", BuildReason.INSTRUCTION_FAILED, "signal 9"),
    _record("terminated", 143, "STEP 2/2: RUN make", BuildReason.INSTRUCTION_FAILED, "signal 15"),
    _record(
        "broken-storage",
        125,
        "Error: mount /build/storage/overlay: permission denied",
        BuildReason.BUILDER_FAILED,
        "permission denied",
    ),
    _record("silence", 125, "", BuildReason.BUILDER_FAILED, "exit code 125"),
)
