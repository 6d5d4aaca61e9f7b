#!/usr/bin/env python3
"""Compiles the .cu files of the emulator's tests to PTX, which is committed beside them.

    python3 -m pip install --target DIR nvidia-cuda-nvrtc-cu12==12.9.86
    tools/compile_kernels.py DIR

No test needs Python or NVRTC: tests read the .ptx files. Run this after a change of a .cu file.
"""

import ctypes
import pathlib
import re
import sys

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "emulator/tests/kernels"
ARCHITECTURE = "compute_80"


def compile_file(nvrtc, path):
    """The PTX of a source file; ends the program with the compiler's messages if it has errors."""
    program = ctypes.c_void_p()
    source = path.read_bytes()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, path.name.encode(), 0, None, None)
    options = [f"--gpu-architecture={ARCHITECTURE}".encode(), b"-lineinfo", b"--std=c++17"]
    array = (ctypes.c_char_p * len(options))(*options)
    if nvrtc.nvrtcCompileProgram(program, len(options), array):
        sys.exit(f"{path}:\n{text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)}")
    ptx = text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    # The compiler puts the current folder before the name.
    return re.sub(r'(\.file\s+\d+ ")[^"]*/', r"\1", ptx)


def text(get_size, get, program):
    """A text that NVRTC holds."""
    size = ctypes.c_size_t()
    get_size(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    get(program, buffer)
    return buffer.value.decode()


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    libraries = sorted(pathlib.Path(sys.argv[1]).rglob("libnvrtc.so.*"))
    if not libraries:
        sys.exit(f"no libnvrtc.so under {sys.argv[1]}")
    nvrtc = ctypes.CDLL(str(libraries[0]))
    for path in sorted(FOLDER.glob("*.cu")):
        path.with_suffix(".ptx").write_text(compile_file(nvrtc, path))
        print(path.with_suffix(".ptx"))


if __name__ == "__main__":
    main()
