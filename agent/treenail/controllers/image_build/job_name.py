"""Names of Jobs."""

MAX_NAME = 63
"""Length limit of the name of a Job: its pods carry it in a label."""


def make_job_name(build: str, attempt: int, architecture: str = "") -> str:
    """Return the name of the Job of an attempt: ``build-BUILD``, with a number from the second on.

    ``architecture`` is empty for a build with only one; otherwise it precedes the number. The hash
    at the end of a build's name stays whole when the name is too long.
    """
    suffix = f"-{architecture}" if architecture else ""
    suffix += "" if attempt == 1 else f"-{attempt}"
    room = MAX_NAME - len("build-") - len(suffix)
    if len(build) > room:
        head, _, tail = build.rpartition("-")
        build = f"{head[: max(room - len(tail) - 1, 0)].rstrip('-.')}-{tail}"[-room:].lstrip("-.")
    return f"build-{build}{suffix}"
