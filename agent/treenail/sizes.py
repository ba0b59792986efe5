"""Sizes in bytes."""

MIB = 1024 * 1024
GIB = 1024 * MIB


def format_bytes(count: int) -> str:
    """Format a size for users, rounded down."""
    if count >= GIB:
        return f"{count / GIB:.1f} GiB"
    return f"{count // MIB} MiB" if count >= MIB else f"{count} bytes"
