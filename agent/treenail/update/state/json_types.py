"""JSON values of the kind that is expected; each raises `TypeError` for any other."""

Json = dict[str, object]


def expect_object(value: object) -> Json:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, found {type(value).__name__}")
    return value


def expect_list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, found {type(value).__name__}")
    return value


def expect_string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, found {type(value).__name__}")
    return value


def expect_number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"expected a number, found {type(value).__name__}")
    return float(value)
