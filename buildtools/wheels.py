"""Builds the wheels of every platform on one Linux machine, and checks each: `make wheels`.

One library serves every Python and every torch from 2.10 on, so a platform has one wheel. GCC compiles those of Linux,
Zig's Clang that of macOS. With a C++ runtime of its own a library could not raise exceptions through torch: each uses
the system's, in a version that manylinux_2_28 or macOS 11 has.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import lief

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
# What a library may need: nothing but torch, the C and the C++ library. Symbols come from these alone.
LIBRARIES = {"libtorch_cpu.so", "libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6"}
LIBRARIES |= {"@rpath/libtorch_cpu.dylib", "/usr/lib/libSystem.B.dylib"}


@dataclass(frozen=True)
class Platform:
    """One wheel: the toolchain file, Python's name of the platform, and the tag of the wheel."""

    toolchain: str
    python: str
    tag: str


PLATFORMS = (
    Platform("x86_64-linux", "linux-x86_64", "manylinux_2_28_x86_64"),
    Platform("aarch64-linux", "linux-aarch64", "manylinux_2_28_aarch64"),
    Platform("arm64-macos", "macosx-11.0-arm64", "macosx_11_0_arm64"),
)


def build(platform: Platform, scratch: Path) -> Path:
    """The wheel, tagged for what it runs on."""
    zig = scratch / "zig"
    zig.mkdir(exist_ok=True)
    for name, command in (("c++", "c++ -target aarch64-macos.11.0"), ("ar", "ar")):
        script = zig / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang {command} "$@"\n')
        script.chmod(0o755)
    environment = os.environ | {
        "CMAKE_TOOLCHAIN_FILE": str(ROOT / f"buildtools/toolchains/{platform.toolchain}.cmake"),
        "_PYTHON_HOST_PLATFORM": platform.python,
        "RMSNORM_ZIG": str(zig),
        "RMSNORM_REQUIRE_KERNELS": "1",
    }
    raw = scratch / platform.toolchain
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", "wheel", str(ROOT)]
    command += ["--no-build-isolation", "--no-deps", "--wheel-dir", str(raw)]
    command += [f"--config-settings=build-dir={scratch / 'build' / platform.toolchain}"]
    subprocess.run(command, env=environment, check=True)
    (wheel,) = raw.glob("*.whl")
    command = [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", platform.tag, str(wheel)]
    name = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().splitlines()[-1]
    DIST.mkdir(exist_ok=True)
    return (raw / Path(name).name).replace(DIST / Path(name).name)


def check(wheel: Path, platform: Platform) -> str:
    """One line about a wheel; raises where it would not run elsewhere."""
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith("_C.so"))
        library = lief.parse(list(archive.read(member)))
    if isinstance(library, lief.ELF.Binary):
        needed, exported = set(library.libraries), [s.name for s in library.exported_symbols]
        tags = lief.ELF.DynamicEntry.TAG
        paths = [e for e in library.dynamic_entries if e.tag in (tags.RUNPATH, tags.RPATH)]
        audit(wheel, platform)
    else:
        own = lief.MachO.LoadCommand.TYPE.ID_DYLIB
        needed = {command.name for command in library.libraries if command.command != own}
        header = {"__mh_dylib_header", "___dso_handle"}  # which every library has
        exported, paths = [s.name for s in library.exported_symbols if s.name not in header], list(library.rpaths)
    if not needed <= LIBRARIES or not any("libtorch_cpu" in name for name in needed):
        raise SystemExit(f"{wheel.name} needs {sorted(needed)}")
    if paths or exported:
        raise SystemExit(f"{wheel.name} has run paths {paths} or exports {exported}")
    imported = len(list(library.imported_symbols))
    return f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {imported} symbols from {', '.join(sorted(needed))}"


def audit(wheel: Path, platform: Platform) -> None:
    """auditwheel's judgement: whether the symbols' versions are those of the tag, or older."""
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    said = " ".join(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    found = re.search(r"constrains the platform tag to \"manylinux_(\d+)_(\d+)_", said)
    if found is None or (int(found[1]), int(found[2])) > (2, 28):
        raise SystemExit(f"{wheel.name} is not {platform.tag}: {said}")


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for platform in (p for p in PLATFORMS if not sys.argv[1:] or p.toolchain in sys.argv[1:]):
            print(f"building for {platform.tag}: a minute or two", flush=True)
            print(check(build(platform, Path(scratch)), platform), flush=True)


if __name__ == "__main__":
    main()
