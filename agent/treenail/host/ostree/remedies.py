"""What to do about what tools say when an image can't be had or put in place."""

_REMEDIES = (
    ("unauthorized", "check the pull secret for the image's registry"),
    ("authentication required", "check the pull secret for the image's registry"),
    ("denied", "check that the pull secret may read the image"),
    ("manifest unknown", "check that the registry has the image by this digest"),
    ("no such host", "check the name of the registry and this node's DNS"),
    ("no space left", "free space in /sysroot and /boot"),
    ("inhibitor", "see who holds it with: systemd-inhibit --list"),
)


def find_remedy(text: str, default: str) -> str:
    """The remedy for the first known sign in the text."""
    lowered = text.lower()
    return next((remedy for sign, remedy in _REMEDIES if sign in lowered), default)
