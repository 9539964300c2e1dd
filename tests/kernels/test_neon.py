"""The NEON kernels, and the portable ones on Arm, give the reference's bits: on Arm itself, or under an emulator."""

import os
import shutil

import pytest

from tests.kernels import replay

EMULATED = replay.host() != "aarch64"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
INSTALL = "apt-get install g++-aarch64-linux-gnu qemu-user"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if not EMULATED:
        return [str(replay.build(tmp_path_factory.mktemp("replay")))]
    missing = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
    if missing:
        reason = f"{' and '.join(missing)} not found: {INSTALL}"
        assert os.environ.get("CI") != "true", reason
        pytest.skip(reason)
    built = replay.build(tmp_path_factory.mktemp("replay"), COMPILER, "aarch64", link=["-static"])
    return [EMULATOR, str(built)]


@pytest.mark.parametrize("isa", ["neon", "portable"])
def test_arm_gives_the_bits_of_the_reference(program, replay_cases, tmp_path, isa):
    found = replay.differences(program, isa, *replay_cases, tmp_path)
    assert not found, f"{len(found)} differences, the first of them:\n" + "\n".join(found[:10])
