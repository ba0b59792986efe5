"""Facts of a Containerfile that the phases need: its images, and the lines of buildah's steps."""

from treenail.image.containerfile import Instruction, parse_containerfile


def find_step_lines(text: str) -> dict[tuple[int, int], int]:
    """Map stage and step, as buildah counts them, to lines of the Containerfile."""
    found: dict[tuple[int, int], int] = {}
    stage = step = 0
    for instruction in parse_containerfile(text).instructions:
        if instruction.keyword == "FROM":
            stage, step = stage + 1, 0
        if stage:
            step += 1
            found[stage, step] = instruction.line
    return found


def find_images(text: str) -> tuple[str, ...]:
    """Return the images of registries that the text needs, as buildah resolves their names.

    Earlier stages, by name or number, and ``scratch`` are no images.
    """
    parsed = parse_containerfile(text)
    images = {stage.line: stage.image for stage in parsed.stages}
    names = {stage.line: stage.name for stage in parsed.stages}
    found: dict[str, None] = {}
    stages: set[str] = {"scratch", ""}
    for instruction in parsed.instructions:
        is_stage = instruction.keyword == "FROM"
        image = images.get(instruction.line, "")
        for reference in [image] if is_stage else _find_flag_images(instruction):
            if reference not in stages:
                found[reference] = None
        if is_stage:
            index = sum(line < instruction.line for line in images)
            stages |= {str(index), names[instruction.line]}
    return tuple(found)


def _find_flag_images(instruction: Instruction) -> list[str]:
    """Return the value of ``--from``, and those of ``from`` in each ``--mount``."""
    if instruction.keyword in {"COPY", "ADD"}:
        return [instruction.find_flag("from").strip("\"'")]
    options = [
        option
        for flag in instruction.flags
        if flag.startswith("--mount=")
        for option in flag.removeprefix("--mount=").split(",")
    ]
    return [each.removeprefix("from=").strip("\"'") for each in options if each.startswith("from=")]
