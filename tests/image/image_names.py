"""Containerfiles, with the images that they need on amd64; None where a name is no image.

`tests/builder/test_image_names.py` lets buildah answer the same.
"""

T = "registry.example.com/tools"
F = "FROM configs AS final\n"
A1 = f"ARG A={T}/a:1\n"
COPY = "COPY --from=${A} /a /b\n"
MOUNT = "RUN --mount=type=bind,from=${A},target=/m ls\n"
LONG = "registry.example.com:5000/a__b/c--d.e:T_1.-x@sha256:" + 64 * "a"

CASES: dict[str, tuple[str, str | None]] = {
    # ARG in COPY --from and RUN --mount=from.
    "copy": (F + A1 + COPY, f"{T}/a:1"),
    "mount": (F + A1 + MOUNT, f"{T}/a:1"),
    "last-wins": (F + A1 + f"ARG A={T}/b:1\n" + COPY, f"{T}/b:1"),
    "set-later": (F + COPY + A1, None),
    "heading-only": (A1 + F + COPY, None),
    "heading-again": (A1 + F + "ARG A\n" + COPY, f"{T}/a:1"),
    "heading-replaced": (A1 + F + f"ARG A={T}/b:1\n" + COPY, f"{T}/b:1"),
    "other-stage": (f"FROM configs AS one\n{A1}FROM one AS two\n{COPY}", None),
    "unset": (F + "ARG A\n" + COPY, None),
    "part": (F + f"ARG A={T}\nCOPY --from=${{A}}/x:1 /a /b\n", f"{T}/x:1"),
    "chain": (F + f"ARG B={T}\nARG A=${{B}}/y:2\n" + COPY, f"{T}/y:2"),
    "two-in-one": (F + f"ARG B=x A={T}/a:1\n" + COPY, f"{T}/a:1"),
    "default": (F + f"COPY --from=${{A:-{T}/d:1}} /a /b\n", f"{T}/d:1"),
    "other": (F + f"ARG A=z\nCOPY --from=${{A:+{T}/p:1}} /a /b\n", f"{T}/p:1"),
    "no-colon": (F + f"COPY --from=${{A-{T}/d:1}} /a /b\n", None),
    "quotes": (F + f'ARG A="{T}/q:1"\n' + COPY, f"{T}/q:1"),
    "quoted-from": (F + f'COPY --from="{T}/q:1" /a /b\n', f"{T}/q:1"),
    # ENV counts for RUN only, and wins.
    "env-copy": (F + f"ENV A={T}/e:1\n" + COPY, None),
    "env-mount": (F + f"ENV A={T}/e:1\n" + MOUNT, f"{T}/e:1"),
    "env-wins": (F + A1 + f"ENV A={T}/e:1\n" + MOUNT, f"{T}/e:1"),
    "env-wins-early": (F + f"ENV A={T}/e:1\n" + A1 + MOUNT, f"{T}/e:1"),
    "env-in-arg": (F + f"ENV B={T}/e:1\nARG A=${{B}}\n" + COPY, f"{T}/e:1"),
    "arg-in-env": (F + f"ARG B={T}/a:1\nENV A=${{B}}\n" + MOUNT, f"{T}/a:1"),
    "env-inherited": (f"FROM configs AS one\nENV A={T}/e:1\nFROM one AS two\n" + MOUNT, f"{T}/e:1"),
    "old-env": (F + f"ENV A {T}/e:1\n" + MOUNT, f"{T}/e:1"),
    # The platform.
    "from-arch": (f"ARG TARGETARCH\nFROM {T}/base-${{TARGETARCH}}:1\n", f"{T}/base-amd64:1"),
    "from-os": (f"ARG TARGETOS\nFROM {T}/base-${{TARGETOS}}:1\n", f"{T}/base-linux:1"),
    "from-build": (f"ARG BUILDARCH\nFROM {T}/base-${{BUILDARCH}}:1\n", f"{T}/base-amd64:1"),
    "from-variant": (f"ARG TARGETVARIANT\nFROM {T}/a:x${{TARGETVARIANT}}\n", f"{T}/a:x"),
    "from-platform": (f"ARG TARGETPLATFORM\nFROM {T}/a:${{TARGETPLATFORM}}\n", None),
    "from-undeclared": (f"FROM {T}/base-${{TARGETARCH}}:1\n", None),
    "from-set": (f"ARG TARGETARCH=zz\nFROM {T}/base-${{TARGETARCH}}:1\n", f"{T}/base-zz:1"),
    "copy-arch": (
        F + f"ARG TARGETARCH\nCOPY --from={T}/a-${{TARGETARCH}}:1 /a /b\n",
        f"{T}/a-amd64:1",
    ),
    "copy-undeclared": (F + f"COPY --from={T}/a-${{TARGETARCH}}:1 /a /b\n", None),
    "mount-arch": (
        F + f"ARG TARGETARCH\nARG A={T}/a-${{TARGETARCH}}:1\n" + MOUNT,
        f"{T}/a-amd64:1",
    ),
    # Stages.
    "stage": (F + "ARG A=configs\n" + COPY, ""),
    "stage-case": ("FROM configs AS One\nFROM configs\nCOPY --from=one /a /c\n", None),
    # Names that are malformed, also only when expanded.
    "capital": (f"ARG A=Upper\nFROM {T}/${{A}}:1\n", None),
    "capital-in-copy": (F + f"ARG A=Upper\nCOPY --from={T}/${{A}}:1 /a /b\n", None),
    "space": (f'ARG A="a b"\nFROM {T}/${{A}}:1\n', None),
    "empty-tag": (f"ARG A=\nFROM {T}/a:${{A}}\n", None),
    "empty-part": (f"ARG A\nFROM {T}/${{A}}/b:1\n", None),
    "short-digest": (f"FROM {T}/a@sha256:abc\n", None),
    "bad-tag": (f"FROM {T}/a:-x\n", None),
    "no-repository": ("FROM registry.example.com/\n", None),
    "url": ("FROM https://registry.example.com/a\n", None),
    "transport": (F + "COPY --from=docker://registry.example.com/a /a /b\n", None),
    "dot": ("FROM registry.example.com/a/.b\n", None),
    "short": (F + "ARG A=fedora\n" + COPY, None),
    "all": (f"FROM {LONG}\n", LONG),
}  # fmt: skip
