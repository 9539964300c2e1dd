# Zig's C++ compiler, of the Python package ziglang: Clang with the headers and stubs of macOS. wheels.py writes the two
# scripts that run it.
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
set(CMAKE_CXX_COMPILER "$ENV{RMSNORM_ZIG}/c++")
set(CMAKE_AR "$ENV{RMSNORM_ZIG}/ar")
set(CMAKE_INSTALL_NAME_TOOL true) # nothing is renamed
set(CMAKE_OSX_SYSROOT "")
set(CMAKE_CXX_COMPILER_WORKS TRUE) # its test program cannot run here
set(RMSNORM_RELEASE ON)
