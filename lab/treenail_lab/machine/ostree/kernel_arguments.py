"""Kernel arguments as libostree edits them: ordered keys, each with one or more values."""

from treenail_lab.machine.ostree.steps import OperationError

BOOT_KEY = "ostree"


class KernelCommandLine:
    """A kernel command line; quotes are kept, and blanks inside them do not separate."""

    def __init__(self, text: str) -> None:
        self._arguments = [a for a in _split_words(text) if _parse_key(a) != BOOT_KEY]

    def list_arguments(self) -> tuple[str, ...]:
        """Return the arguments without ``ostree=``, which names the deployment."""
        return tuple(self._arguments)

    def append(self, argument: str) -> None:
        """Add the argument, also when its key exists."""
        self._arguments.append(argument)

    def append_if_missing(self, argument: str) -> bool:
        """Add the argument unless the same argument exists; return whether it was added."""
        if argument in self._arguments:
            return False
        self.append(argument)
        return True

    def delete(self, argument: str) -> None:
        """Remove ``key=value``, or ``key`` when it has one value."""
        self._arguments.pop(self._find_position(argument))

    def delete_if_present(self, argument: str) -> bool:
        """Remove the argument if it exists; return whether it did."""
        present = argument in self._arguments or (
            "=" not in argument and any(_parse_key(a) == argument for a in self._arguments)
        )
        if present:
            self.delete(argument)
        return present

    def replace(self, argument: str) -> None:
        """Replace a key's only value by ``key=new``, or one of several by ``key=old=new``."""
        key, equals, rest = argument.partition("=")
        old, more, new = rest.partition("=")
        if more and f"{key}={old}" in self._arguments:
            self._arguments[self._find_position(f"{key}={old}")] = f"{key}={new}"
        else:
            self._arguments[self._find_position(key)] = f"{key}{equals}{rest}"

    def _find_position(self, argument: str) -> int:
        key, equals, _ = argument.partition("=")
        positions = [i for i, a in enumerate(self._arguments) if _parse_key(a) == key]
        if not positions:
            raise OperationError(f"No key '{key}' found")
        if equals:
            positions = [i for i in positions if self._arguments[i] == argument]
            if not positions:
                raise OperationError(f"No karg '{argument}' found")
        elif len(positions) > 1:
            raise OperationError(f"Multiple values for key '{key}' found")
        return positions[0]


def _parse_key(argument: str) -> str:
    return argument.partition("=")[0]


def _split_words(text: str) -> list[str]:
    words: list[str] = []
    quoted = fresh = False
    for character in text:
        if character.isspace() and not quoted:
            fresh = False
            continue
        quoted ^= character == '"'
        if fresh:
            words[-1] += character
        else:
            words.append(character)
            fresh = True
    return words
