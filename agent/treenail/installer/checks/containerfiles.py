"""Reads the Containerfiles that the field ``imageMode`` names, and finds what is wrong in them."""

from pathlib import Path

from treenail.api.machineosconfig import CONTAINERFILE_LIMIT
from treenail.image.inputs.containerfile_problems import find_containerfile_problems
from treenail.installer.checks.containerfile_sources import find_source_problems
from treenail.installer.inputs.install_problem import InstallProblem
from treenail.installer.inputs.manifest_files import NotAFileError, read_regular_file

_MAX_BYTES = 4 * CONTAINERFILE_LIMIT
"""Characters have up to 4 bytes."""


def read_containerfile(
    root: Path, name: str, *, where: str, line: int
) -> tuple[str, list[InstallProblem]]:
    """Return the text and its problems; ``where`` and ``line`` are those of the field.

    The file is below the install directory, also through links.
    """

    def refuse(text: str, remedy: str) -> tuple[str, list[InstallProblem]]:
        return "", [InstallProblem(where, f"containerFile {name[:200]!r}: {text}", remedy, line)]

    try:
        inside = root.resolve()
        path = (root / name).resolve()
        if Path(name).is_absolute() or not path.is_relative_to(inside):
            return refuse(
                "it is outside of the install directory",
                "copy it into the install directory, and name it by its path there",
            )
        if path.is_dir():
            return refuse("it is a directory", "name a file in it")
        content, size = read_regular_file(path, _MAX_BYTES)
    except FileNotFoundError:
        return refuse("no such file in the install directory", "correct the name, or create it")
    except NotAFileError:
        return refuse("it is a pipe, a socket or a device", "name a regular file")
    except (OSError, ValueError, RuntimeError) as error:
        cause = error.strerror if isinstance(error, OSError) else None
        return refuse(f"cannot read it: {cause or 'its name cannot be used'}", "correct the name")
    if size > _MAX_BYTES:
        return "", [
            InstallProblem(
                name,
                f"expected at most {CONTAINERFILE_LIMIT} characters, found {size} bytes",
                "move files into the ConfigMap that the annotation treenail.io/context names, and "
                "copy them",
            )
        ]
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line_number = content.count(b"\n", 0, error.start) + 1
        return "", [InstallProblem(name, "expected UTF-8", "save the file as UTF-8", line_number)]
    if not text.strip():
        # Not an image with the config alone: the user named a file, and lost its content.
        return refuse("the file is empty", "write instructions, or remove the field containerFile")
    problems = [*find_containerfile_problems(text), *find_source_problems(text, ())]
    return text, [InstallProblem(name, each.text, each.remedy, each.line) for each in problems]
